"""vLLM's FlashInfer builder with the plugin: what it plans from, and what its kernels would then mask by."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from undone import ledger_of, undone

from benchmarks import plan_time
from vllm_async_spec import reset_sync_report, sync_policy, sync_report
from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.compat import builders
from vllm_async_spec.compat.builder_inputs import HOPPER, stand_on
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.patches import (
    flashinfer_builder,
    flashinfer_graphs,
    flashinfer_mixed,
    flashinfer_xqa,
    flashinfer_xqa_shapes,
)

PAGE, DRAFTS, LONGEST = 16, 3, 8192
BATCHES = {
    "one token each": ([1, 1, 1], [33, 1, 48]),
    "drafts": ([4, 4, 4], [33, 17, 50]),
    "fewer drafts": ([4, 2, 3], [33, 17, 50]),
    "two tokens each": ([2, 2], [33, 17]),
    "mixed": ([4, 4, 9, 40], [33, 17, 30, 40]),
    "ragged and a prefill": ([1, 4, 2, 40], [16, 17, 65, 40]),
    "page boundary": ([4, 4, 4], [16, 17, 15]),
    "padded": ([4, 4, 0], [33, 17, 0]),
    "prompts": ([20, 9], [20, 30]),
}


@pytest.fixture(scope="module")
def module(release: str) -> Any:
    if tuple(map(int, release.split("."))) < (0, 20):
        pytest.skip(f"vLLM {release} gives no upper bound to plan from")
    fake_flashinfer.install()
    with undone() as patch:
        patch.setattr(adapter, "_processors", lambda device: fake_flashinfer.PROCESSORS)
        # Each builder fills its own with zeros, and vLLM's 394 MiB take half a second.
        patch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", str(16 << 20))
        patch.setattr(flashinfer_xqa, "xqa_source", lambda: "a fake")
        patch.setattr(flashinfer_builder, "_PLAN_BYTES", fake_flashinfer.INTS)
        module = importlib.import_module("vllm.v1.attention.backends.flashinfer")
        ledger = ledger_of(("flashinfer-builder", "flashinfer-xqa"))
        ledger.install()
        layer = importlib.import_module("vllm.v1.attention.backends.utils").PerLayerParameters(-1, None, 0.125)
        patch.setattr(module, "get_per_layer_parameters", lambda *arguments: {"layer": layer})
        # What the engine resolves at start-up, and a Triton kernel of vLLM's that copies page indices.
        if hasattr(module.FlashInferMetadataBuilder, "kv_cache_layout"):
            patch.setattr(module.FlashInferMetadataBuilder, "kv_cache_layout", None)
            patch.setattr(module, "get_flashinfer_layout_string", lambda layout: "NHD")
        patch.setattr(module, "_copy_page_indices_kernel", {(n,): lambda *a, **k: None for n in range(1, 64)})
        for outcome in ledger.outcomes.values():
            assert outcome.state in (State.APPLIED, State.NOT_NEEDED), outcome.detail
        assert ledger.outcomes["flashinfer-builder"].state is State.APPLIED
        yield module


@pytest.fixture(params=["fa2", "fa3"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fake_flashinfer.Wrapper, "backend", request.param)
    return request.param


@pytest.fixture(scope="module", params=["native", "xqa"])
def setting(request: pytest.FixtureRequest, module: Any) -> Iterator[tuple[Any, ...]]:
    if request.param == "xqa" and not hasattr(module, "FlashInferDecodeKernel"):
        pytest.skip("this vLLM has no XQA")
    trtllm = None if request.param == "xqa" else False
    with builders.flashinfer_setting(
        spec_tokens=DRAFTS, block_size=PAGE, trtllm=trtllm, max_model_len=LONGEST
    ) as arguments:
        yield arguments


@pytest.fixture
def builder(module: Any, setting: tuple[Any, ...], kind: str) -> Any:
    return warmed(module.FlashInferBackend.get_builder_cls()(*setting))


def warmed(builder: Any) -> Any:
    """As vLLM's warm-up leaves it."""
    builder.build(0, metadata([1, 9], [3, 9], 0))
    return builder


def metadata(query: list[int], exact: list[int], slack: int) -> Any:
    """What a runner gives: the device's lengths, and a bound that is exact for prefills only."""
    prefilling = torch.tensor([count > 1 + DRAFTS for count in query])
    made = builders.common_metadata(
        query, [length + slack * (length > 0) for length in exact], is_prefilling=prefilling
    )
    lengths = torch.tensor(exact, dtype=torch.int32)
    bound = torch.where(prefilling | (lengths == 0), lengths, lengths + slack)
    return dataclasses.replace(made, seq_lens=lengths, seq_lens_cpu_upper_bound=bound)


def made_on(capability: tuple[int, int], module: Any, setting: tuple[Any, ...]) -> Any:
    """A builder as on such a GPU."""
    stand_on(capability, "FlashInfer")
    try:
        return warmed(module.FlashInferBackend.get_builder_cls()(*setting))
    finally:
        stand_on(HOPPER, "FlashInfer")


def room(builder: Any, planned: int, tokens: int) -> int:
    """Bytes that a graph of so many tokens in all needs."""
    heads = builder.num_qo_heads, builder.num_kv_heads, builder.head_dim
    return adapter.split_bytes(planned, tokens, *heads, builder.device)


def give_workspace(builder: Any, nbytes: int) -> torch.Tensor:
    """A workspace of this size, which wrappers made from now on have."""
    builder._workspace_buffer = torch.empty(nbytes, dtype=torch.uint8)
    builder._prefill_wrapper = None
    return builder._workspace_buffer


def wrappers(built: Any) -> list[fake_flashinfer.Wrapper]:
    """Those that this batch was planned with, decodes first."""
    return [part.wrapper for part in (built.decode, built.prefill) if hasattr(part, "wrapper")]


def pages_planned(wrapper: fake_flashinfer.Wrapper) -> list[int]:
    plan = wrapper.plans[-1]
    return plan.get("paged_kv_indptr", plan.get("indptr")).diff().tolist()


@pytest.mark.parametrize("slack", [0, 1, DRAFTS, 17])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_host_plans_from_the_bound_and_kernels_mask_by_the_devices_lengths(
    builder: Any, batch: str, slack: int
) -> None:
    query, exact = BATCHES[batch]
    given = metadata(query, exact, slack)
    reset_sync_report()
    with sync_policy("error"):
        built = builder.build(0, given)
    report = sync_report()
    assert (report.count, report.fallbacks) == (0, {})
    first = built_on_device(built)
    bounds = given.seq_lens_cpu_upper_bound.tolist()[first:]
    if any(each.is_cuda_graph_enabled for each in wrappers(built)) and built.prefill is not None:
        # Such a plan is for later steps too, as far as the block table goes.
        bounds = [bound and given.block_table_tensor.shape[1] * PAGE for bound in bounds]
    assert_before_empty(map(pages_planned, wrappers(built)), [-(-bound // PAGE) for bound in bounds])
    assert_before_empty((each.lengths(PAGE) for each in wrappers(built)), exact[first:])
    assert all(each.split_is_right(PAGE) for each in wrappers(built))
    if built_on_device(built):
        assert type(built.decode.seq_lens) is torch.Tensor
        assert built.decode.seq_lens.tolist() == exact[: built.num_decodes]


def assert_before_empty(found: Iterable[list[int]], expected: list[int]) -> None:
    """Whether the wrappers have these requests, and a graph nothing but empty ones behind them."""
    joined = [value for each in found for value in each]
    assert joined[: len(expected)] == expected
    assert not any(joined[len(expected) :])


def built_on_device(built: Any) -> int:
    """How many requests XQA takes, which is planned by nobody."""
    return built.num_decodes if hasattr(built.decode, "seq_lens") else 0


def test_without_the_correction_kernels_would_mask_by_the_bound(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_builder, "write_exact_lengths", lambda *arguments: None)
    given = metadata(*BATCHES["mixed"], DRAFTS)
    built = builder.build(0, given)
    bound = given.seq_lens_cpu_upper_bound.tolist()
    assert [length for each in wrappers(built) for length in each.lengths(PAGE)] == bound[built_on_device(built) :]


def test_two_plans_in_flight_share_no_buffer(builder: Any) -> None:
    given = metadata(*BATCHES["ragged and a prefill"], DRAFTS)
    addresses = []
    for _ in range(3):
        built = builder.build(0, given)
        addresses += [each.plans[-1]["buffer"].data_ptr() for each in wrappers(built)]
    assert addresses
    assert len(set(addresses)) == len(addresses)


def test_each_buffer_is_fenced_behind_its_plan_and_before_another_is_lent(
    builder: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, happened = builder._plan_buffers._ring, []
    lend, fence, plan, fast_plan = ring.next, ring.fence, fake_flashinfer.Wrapper.plan, module.fast_decode_plan

    def lent() -> torch.Tensor:
        buffer: torch.Tensor = lend()
        happened.append(("lent", buffer.data_ptr()))
        return buffer

    def fenced() -> None:
        happened.append(("fenced", ring._buffers[ring._turn].data_ptr()))
        fence()

    def planning(original: Any) -> Any:
        def planned(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            happened.append(("planned", wrapper._pin_memory_int_workspace_buffer.data_ptr()))
            original(wrapper, *args, **kwargs)

        return planned

    monkeypatch.setattr(ring, "next", lent)
    monkeypatch.setattr(ring, "fence", fenced)
    monkeypatch.setattr(fake_flashinfer.Wrapper, "plan", planning(plan))
    monkeypatch.setattr(module, "fast_decode_plan", planning(fast_plan))
    for batch in ("ragged and a prefill", "one token each", "one token each", "drafts"):
        built = builder.build(0, metadata(*BATCHES[batch], DRAFTS))
        assert len(happened) % 3 == 0, "a build ends with a buffer that is not fenced"
        assert bool(happened) or built_on_device(built)
    for at in range(0, len(happened), 3):
        assert [what for what, _ in happened[at : at + 3]] == ["lent", "planned", "fenced"]
        assert len({buffer for _, buffer in happened[at : at + 3]}) == 1


@pytest.fixture
def copies(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each source in pinned memory that a copy to the device was started from, or a plan made from, and its contents.

    Nothing is pinned without a GPU, so what asks for it is told that it is. The device may read a source at any time.
    """
    pinned: dict[int, torch.Tensor] = {}
    sources: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy, plan, is_pinned = torch.Tensor.copy_, fake_flashinfer.Wrapper.plan, torch.Tensor.is_pinned

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def known(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in pinned

    def pinning(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return pin(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

        return made

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and known(source):
            sources.append((source, source.clone()))
        return copy(self, source)

    def planned(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and known(each)]
        sources.extend((each, each.clone()) for each in given)
        plan(self, *args, **kwargs)

    for name in ("zeros", "zeros_like"):
        monkeypatch.setattr(torch, name, pinning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pin(self.clone()))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: known(self) or is_pinned(self))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(fake_flashinfer.Wrapper, "plan", planned)
    monkeypatch.setattr(module, "PIN_MEMORY", True, raising=False)
    monkeypatch.setattr(module, "is_pin_memory_available", lambda: True, raising=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    return sources


@pytest.mark.parametrize("batch", BATCHES)
def test_no_build_writes_what_a_copy_may_not_have_read(
    module: Any, setting: tuple[Any, ...], kind: str, batch: str, copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    builder = module.FlashInferBackend.get_builder_cls()(*setting)
    query, exact = BATCHES[batch]
    builder.build(0, metadata(query, exact, DRAFTS))
    builder.build(0, metadata(query, [length + 3 * PAGE - 1 for length in exact], 17))
    for source, contents in copies:
        assert torch.equal(source, contents)


def test_upstreams_buffers_are_written_while_they_are_copied_under_the_v1_runner(
    module: Any, release: str, kind: str, copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """What the buffers are made pageable for; in stock the wait for exact lengths stands between two builds."""
    with builders.flashinfer_setting(spec_tokens=DRAFTS, block_size=PAGE, trtllm=False) as setting:
        builder = module.FlashInferMetadataBuilder(*setting)
        for more in (0, 3 * PAGE - 1):
            given = builders.common_metadata([1, 1, 1], [33 + more, 1 + more, 48 + more], host=True)
            builder.build(0, given)
    overtaken = [source for source, contents in copies if not torch.equal(source, contents)]
    assert bool(overtaken) is (tuple(map(int, release.split("."))) < (0, 29))


@pytest.mark.parametrize("batch", ["drafts", "mixed", "padded"])
def test_without_counting_chunks_again_they_would_be_the_bounds(
    builder: Any, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_carry_chunks", lambda *arguments: None)
    built = builder.build(0, metadata(*BATCHES[batch], 17))
    drafts_are_split = built_on_device(built) == 0 and wrappers(built)[-1]._backend == "fa2"
    assert any(not each.split_is_right(PAGE) for each in wrappers(built)) is drafts_are_split


def test_a_graph_finds_its_plan_where_it_was_captured(builder: Any) -> None:
    (first,) = wrappers(builder.build(0, metadata(*BATCHES["drafts"], DRAFTS)))
    (smaller,) = wrappers(builder.build(0, metadata(*BATCHES["two tokens each"], DRAFTS)))
    (eager,) = wrappers(builder.build(0, metadata([4, 9], [20, 40], DRAFTS)))
    (again,) = wrappers(builder.build(0, metadata(*BATCHES["page boundary"], 17)))
    assert first is again
    assert first.is_cuda_graph_enabled
    assert smaller.is_cuda_graph_enabled
    assert not eager.is_cuda_graph_enabled
    assert first is not smaller
    for name in ("_int_workspace_buffer", "_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf"):
        assert getattr(first, name).data_ptr() == getattr(smaller, name).data_ptr()
        assert getattr(first, name).data_ptr() != getattr(eager, name).data_ptr()


def test_a_batch_is_planned_with_what_pads_it_to_the_size_of_a_graph(builder: Any) -> None:
    given = dataclasses.replace(metadata(*BATCHES["padded"], DRAFTS), num_actual_tokens=12)
    (wrapper,) = wrappers(builder.build(0, given))
    assert wrapper.is_cuda_graph_enabled
    assert wrapper._qo_indptr_buf.tolist()[:4] == [0, 4, 8, 8]
    assert set(wrapper._qo_indptr_buf.tolist()[4:]) <= {8}
    assert wrapper._qo_indptr_last == 12


def drafts(exact: list[int], padding: int = 0, slack: int = DRAFTS, tokens: int = 1 + DRAFTS) -> Any:
    """A batch of drafts with a block table as wide as the engine's, in which pages change from step to step."""
    given = metadata([tokens] * len(exact) + [0] * padding, exact + [0] * padding, slack)
    table = torch.randint(1, 10_000, (given.num_reqs, LONGEST // PAGE), dtype=torch.int32)
    return dataclasses.replace(given, block_table_tensor=table)


def pages_read(wrapper: fake_flashinfer.Wrapper, requests: int) -> list[list[int]]:
    """Of each request, those of its exact length."""
    starts, indices = wrapper._paged_kv_indptr_buf.tolist(), wrapper._paged_kv_indices_buf.tolist()
    pages = [-(-length // PAGE) for length in wrapper.lengths(PAGE)[:requests]]
    return [indices[start : start + count] for start, count in zip(starts, pages, strict=False)]


def test_a_plan_serves_until_a_request_outgrows_it(builder: Any) -> None:
    exact, counts = [33, 17, 250], []
    for _ in range(45):
        given = drafts(exact)
        built = builder.build(0, given)
        (wrapper,) = wrappers(built)
        assert_before_empty([wrapper.lengths(PAGE)], exact)
        assert wrapper.split_is_right(PAGE)
        if counts and len(wrapper.plans) == counts[-1]:
            table = given.block_table_tensor.tolist()
            assert pages_read(wrapper, 3) == [table[row][: -(-length // PAGE)] for row, length in enumerate(exact)]
        counts.append(len(wrapper.plans))
        exact = [length + (1 + DRAFTS if row == 1 else 1) for row, length in enumerate(exact)]
    ahead = flashinfer_graphs.AHEAD // (1 + DRAFTS)
    assert counts == [1] * (ahead + 1) + [2] * (44 - ahead)


def test_what_is_built_of_an_older_plan_is_what_vllm_would_build(
    builder: Any, module: Any, setting: tuple[Any, ...]
) -> None:
    for each in (builder, fresh := made_on(HOPPER, module, setting)):
        each.build(0, drafts([33, 17, 250], padding=1))
    fresh._planners[0]._plan = None
    given = dataclasses.replace(drafts([34, 21, 250], padding=1), num_actual_tokens=16)
    found, expected = (each.build(0, given) for each in (builder, fresh))
    assert [len(wrappers(each)[0].plans) for each in (found, expected)] == [1, 2]
    for field in dataclasses.fields(found):
        if field.name != "prefill":
            assert getattr(found, field.name) is getattr(expected, field.name) or (
                getattr(found, field.name) == getattr(expected, field.name)
            ), field.name
    ours, vllms = wrappers(found)[0], wrappers(expected)[0]
    assert ours._qo_indptr_last == vllms._qo_indptr_last == 16
    assert ours.lengths(PAGE) == vllms.lengths(PAGE)


AHEAD = flashinfer_graphs.AHEAD
OTHERS: dict[str, tuple[Any, Any]] = {
    "longer by a token": (lambda: drafts([33, 17, 250]), lambda: drafts([33, 17, 251 + AHEAD])),
    "much shorter": (lambda: drafts([33, 17, 250]), lambda: drafts([33, 17, 249 - AHEAD])),
    "more padding": (lambda: drafts([33, 17, 20]), lambda: drafts([33, 17], padding=1)),
    "more requests": (lambda: drafts([33, 17]), lambda: drafts([33, 17, 9])),
    "fewer tokens": (lambda: drafts([33, 17]), lambda: drafts([33, 17], tokens=2)),
    "as many tokens of fewer requests": (
        lambda: drafts([33, 17, 20, 9], tokens=2),
        lambda: drafts([33, 17], padding=2),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_serves_no_other_batch(builder: Any, other: str) -> None:
    first, then = (make() for make in OTHERS[other])
    # And the other's is none for the first, whose wrapper shares its buffers.
    for given in (first, then, first):
        before = [len(each.plans) for each in builder._planners[0]._by_size.values()]
        (wrapper,) = wrappers(builder.build(0, given))
        assert sum(len(each.plans) for each in builder._planners[0]._by_size.values()) == 1 + sum(before)
        assert_before_empty([wrapper.lengths(PAGE)], given.seq_lens.tolist())
        assert wrapper.split_is_right(PAGE)


@pytest.mark.parametrize("requests", [1, 8])
def test_no_request_is_looked_at_in_python_to_plan_flash_attention_2(builder: Any, requests: int) -> None:
    """FlashInfer calls Python's `max` on lengths, and on query lengths unless it is told of the most."""
    (wrapper,) = wrappers(builder.build(0, drafts([33] * (requests - 1) + [250])))
    plan, most = wrapper.plans[-1], -(-(250 + DRAFTS + AHEAD) // PAGE) * PAGE
    assert wrapper._backend == "fa2"
    assert (plan["seq_lens"].tolist(), plan["max_token_per_sequence"]) == ([most], 1 + DRAFTS)


def test_what_was_kept_of_a_plan_goes_with_it(builder: Any) -> None:
    (wrapper,) = wrappers(builder.build(0, drafts([33, 17, 250])))
    assert (wrapper.kept is None) is (wrapper._backend == "fa3")
    wrapper.kept = ()
    wrapper.plan(**{name: value for name, value in wrapper.plans[-1].items() if name != "buffer"})
    assert wrapper.kept is None


@pytest.mark.parametrize("interruption", ["exact lengths", "a failing build", "a batch outside graphs"])
def test_a_plan_that_was_written_over_serves_no_more(
    builder: Any, interruption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wrapper,) = wrappers(builder.build(0, drafts([33, 17, 250])))
    if interruption == "exact lengths":
        with monkeypatch.context() as patch:
            patch.setattr(builder, "is_kvcache_nvfp4", True, raising=False)
            builder.build(0, drafts([33, 17, 250]))
    elif interruption == "a failing build":

        def plan(self: Any, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a failing build")

        with monkeypatch.context() as patch:
            patch.setattr(fake_flashinfer.Wrapper, "plan", plan)
            with pytest.raises(RuntimeError, match="a failing build"):
                builder.build(0, drafts([33, 17, 500]))
    else:
        builder.build(0, metadata([4, 9], [20, 40], DRAFTS))
    planned = len(wrapper.plans)
    builder.build(0, drafts([33, 17, 250]))
    assert len(wrapper.plans) - planned == (0 if interruption == "a batch outside graphs" else 1)


def test_a_plan_that_is_not_kept_has_too_few_chunks_for_later_steps(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chunks behind the first step's lengths were written over."""
    monkeypatch.setattr(flashinfer_graphs, "keep_plan", lambda *arguments: None)
    builder.build(0, drafts([33, 17, 50]))
    (wrapper,) = wrappers(builder.build(0, drafts([80, 17, 50])))
    assert wrapper.split_is_right(PAGE) is (wrapper._backend == "fa3")


def kernel(builder: Any, query: list[int]) -> str:
    """What verifies such a batch."""
    built = builder.build(0, metadata(query, [40 * (tokens > 0) for tokens in query], DRAFTS))
    if built_on_device(built):
        return "xqa"
    (wrapper,) = wrappers(built)
    return f"{wrapper._backend} in a graph" if wrapper.is_cuda_graph_enabled else wrapper._backend


@pytest.mark.parametrize("query", [[4], [4] * 4, [4, 4, 4, 0], [4, 0, 0, 0], [2, 2], [4] * 5, [4, 4, 4, 4, 0], [4] * 8])
def test_drafts_are_flash_attention_2s(builder: Any, query: list[int]) -> None:
    assert kernel(builder, query) == "fa2 in a graph"


@pytest.mark.parametrize("group", [1, 16, 17])
def test_xqa_keeps_drafts_whose_rows_take_the_widest_pieces_of_work(
    module: Any, setting: tuple[Any, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tokens in groups of 16 heads are 64 rows, in groups of 17 more."""
    told: list[str] = []
    monkeypatch.setattr(flashinfer_builder, "inform", told.append)
    flashinfer_builder._say.cache_clear()
    upstream = module.FlashInferBackend.get_builder_cls().__bases__[-1]
    made = upstream.__init__

    def with_groups(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.num_qo_heads = group * self.num_kv_heads

    monkeypatch.setattr(upstream, "__init__", with_groups)
    for _ in range(2):  # a drafter has a builder too
        builder = made_on(HOPPER, module, setting)
    if builder.reorder_batch_threshold == 1:
        pytest.skip("there is no XQA, and FlashAttention 2 has all drafts")
    assert kernel(builder, [4] * 2) == ("xqa" if group == 17 else "fa2 in a graph")
    assert told == (
        []
        if group == 17
        else ["vllm-async-spec: FlashAttention 2 verifies drafts in CUDA graphs, XQA has the other decodes"]
    )


@pytest.mark.parametrize("capability", [(8, 9), HOPPER])
@pytest.mark.parametrize(("requests", "tokens"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 3)])
def test_no_piece_of_work_of_a_graph_has_more_rows_than_a_request(
    module: Any, setting: tuple[Any, ...], capability: tuple[int, int], requests: int, tokens: int
) -> None:
    """FlashInfer alone has room in each for as many as one request could have: 52 and not 16 for four with four."""
    builder = made_on(capability, module, setting)
    (wrapper,) = wrappers(builder.build(0, metadata([tokens] * requests, [40] * requests, DRAFTS)))
    for live in range(1, requests + 1):
        padding = [0] * (requests - live)
        builder.build(0, metadata([tokens] * live + padding, [40] * live + padding, DRAFTS))
        assert wrapper._plan_info[3] == 16


@pytest.mark.parametrize("missing", [0, 1])
def test_where_that_needs_more_room_than_there_is_or_would_be_pieces_stay_large(
    module: Any, setting: tuple[Any, ...], missing: int
) -> None:
    builder = made_on(HOPPER, module, setting)
    builder.num_qo_heads = 8 * builder.num_kv_heads
    planned = adapter.planned_requests(4, 4, 8)
    assert room(builder, planned, 16) > room(builder, 4, 16)
    given = give_workspace(builder, room(builder, planned, 16) - missing)
    (wrapper,) = wrappers(builder.build(0, metadata([4] * 4, [40] * 4, DRAFTS)))
    assert len(wrapper._paged_kv_last_page_len_buf) == (4 if missing else planned)
    assert wrapper._float_workspace_buffer is given
    assert wrapper._plan_info[3] == (128 if missing else 64)


@pytest.mark.parametrize("query", [[4, 2, 4, 4], [4, 1], [1, 4]])
def test_so_are_drafts_of_different_numbers(builder: Any, query: list[int], kind: str) -> None:
    if builder.reorder_batch_threshold > 1:
        assert kernel(builder, query) == "xqa"
    else:
        prefills = builder.build(0, metadata(query, [40] * len(query), DRAFTS)).prefill.wrapper
        assert (prefills._backend, prefills.is_cuda_graph_enabled) == (kind, False)


def test_graphs_are_for_causal_drafts_no_larger_than_the_largest(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, given = builder._planners[0], metadata(*BATCHES["drafts"], DRAFTS)
    assert graphs.takes(given)
    assert not graphs.takes(dataclasses.replace(given, causal=False))
    found = []
    for most in (12, 11):
        monkeypatch.setattr(graphs, "_most_tokens", most)
        found.append(graphs.takes(given))
    assert found == [True, False]


@pytest.mark.parametrize("requests", range(1, 9))
def test_a_graph_is_captured_with_the_kernel_that_its_batches_get(builder: Any, requests: int) -> None:
    captured = builder.build_for_cudagraph_capture(metadata([4] * requests, [4] * requests, 0))
    for live in range(1, requests + 1):
        padding = [0] * (requests - live)
        replayed = builder.build(0, metadata([4] * live + padding, [40] * live + padding, DRAFTS))
        assert wrappers(replayed) == wrappers(captured)


@pytest.mark.parametrize("requests", [1, 4])
def test_xqa_decodes_single_tokens_and_flashinfer_chooses_for_prompts(builder: Any, requests: int, kind: str) -> None:
    assert kernel(builder, [2 + DRAFTS] * requests) == kind
    xqa = flashinfer_xqa_shapes.decodes_with_xqa(builder)
    assert kernel(builder, [1] * requests) == ("xqa" if xqa else f"{kind} in a graph")


@pytest.mark.parametrize("changed", [(8, 9), (12, 0), torch.float8_e4m3fn])
def test_with_other_gpus_and_caches_nothing_is_chosen_by_the_plugin(
    module: Any, setting: tuple[Any, ...], kind: str, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = module.FlashInferBackend.get_builder_cls()
    if isinstance(changed, torch.dtype):
        made = ours.__bases__[-1].__init__

        def with_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            self.kv_cache_dtype = changed

        monkeypatch.setattr(ours.__bases__[-1], "__init__", with_cache)
        builder = ours(*setting)
    else:
        kind = "fa2"
        monkeypatch.setattr(fake_flashinfer.Wrapper, "backend", kind)
        builder = made_on(changed, module, setting)
    takes_drafts = builder.reorder_batch_threshold > 1
    assert [kernel(builder, [4] * requests) for requests in (1, 4, 5)] == [
        "xqa" if takes_drafts else f"{kind} in a graph"
    ] * 3
    if not takes_drafts:
        for length in (40, 900):
            (wrapper,) = wrappers(builder.build(0, metadata([4, 4], [40, length], DRAFTS)))
        assert wrapper.asked == "auto"
        # FlashAttention 3 plans from each length, FlashAttention 2 from pages alone.
        assert len(wrapper.plans) == 2
        given = wrapper.plans[-1].get("seq_lens")
        assert given is None or len(given) == (1 if wrapper._backend == "fa2" else 2)


@pytest.mark.parametrize("batch", ["drafts", "fewer drafts", "mixed", "prompts"])
def test_vllm_orders_its_batches_as_before(builder: Any, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threshold, seen = builder.reorder_batch_threshold, []

    def build(self: Any, *args: Any) -> Any:
        seen.append(self.reorder_batch_threshold)
        raise RuntimeError("a failing build")

    with monkeypatch.context() as patch:
        patch.setattr(type(builder).__bases__[-1], "build", build)
        with pytest.raises(RuntimeError, match="a failing build"):
            builder.build(0, metadata(*BATCHES[batch], DRAFTS))
    assert seen == [0 if batch in ("drafts", "mixed") else threshold]
    left = (threshold, None, None)
    assert (builder.reorder_batch_threshold, builder._building.batch, builder._building.planner) == left
    builder.build(0, metadata(*BATCHES[batch], DRAFTS))
    assert (builder.reorder_batch_threshold, builder._building.batch, builder._building.planner) == left


@pytest.mark.parametrize("capability", [(8, 9), HOPPER])
def test_a_plan_for_a_graph_has_room_for_keys_that_are_split(
    module: Any, setting: tuple[Any, ...], capability: tuple[int, int]
) -> None:
    """Without it FlashInfer fails: three drafts and 512 requests of an 8b need more than vLLM's workspace has."""
    builder = made_on(capability, module, setting)
    sizes = (8, 3, 4)  # the largest first, as graphs are captured
    if not builder._planners:
        pytest.skip("XQA takes all drafts on this GPU")
    group = builder.num_qo_heads // builder.num_kv_heads
    needed = {requests: room(builder, adapter.planned_requests(requests, 4, group), 4 * requests) for requests in sizes}
    given = give_workspace(builder, needed[3])
    found = {}
    for requests in sizes:
        (wrapper,) = wrappers(builder.build(0, metadata([4] * requests, [40] * requests, DRAFTS)))
        found[requests] = wrapper._float_workspace_buffer
        assert wrapper._plan_info[3] == 16
    assert found[3] is given
    assert found[4] is found[sizes[0]]
    assert found[4].nbytes >= needed[sizes[0]] >= needed[4] > given.nbytes


MIXED = [[4, 9], [4, 4, 9, 40], [1, 1, 9], [1, 4, 2, 40], [4] * 7 + [30]]


@pytest.mark.parametrize("query", MIXED)
def test_drafts_and_short_prompts_are_planned_together(builder: Any, query: list[int]) -> None:
    built = builder.build(0, metadata(query, [40 + tokens for tokens in query], DRAFTS))
    assert (built.num_decodes, built.num_prefills, built.num_prefill_tokens) == (0, len(query), sum(query))
    (wrapper,) = wrappers(built)
    assert (wrapper._backend, wrapper.is_cuda_graph_enabled) == ("fa2", False)


def test_the_warm_up_loads_what_long_prompts_need(module: Any, setting: tuple[Any, ...], kind: str) -> None:
    builder = module.FlashInferBackend.get_builder_cls()(*setting)
    found = [builder.build(0, metadata([1, 9], [3, 9], 0)).prefill.wrapper._backend for _ in range(3)]
    assert found == [kind, "fa2", "fa2"]


def test_flash_attention_2_is_loaded_before_the_first_request(
    module: Any, setting: tuple[Any, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_flashinfer, "loaded", [])
    flashinfer_mixed._load.cache_clear()
    builder = module.FlashInferBackend.get_builder_cls()(*setting)
    loaded = list(fake_flashinfer.loaded)
    for query in ([4, 4], *MIXED):
        (*_, wrapper) = wrappers(warmed(builder).build(0, metadata(query, [40 + each for each in query], DRAFTS)))
        assert [wrapper.module] == loaded


def test_where_queries_have_one_dtype_it_is_loaded_for_that(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.24, of which no release is fetched here."""
    query = getattr(builder, "q_data_type_prefill", None) or builder.q_data_type
    kept = {name: each for name, each in vars(builder).items() if not name.startswith("q_data_type_")}
    older = types.SimpleNamespace(**kept)
    older.q_data_type, older.window_left, older.logits_soft_cap = query, -1, None
    monkeypatch.setattr(fake_flashinfer, "loaded", [])
    flashinfer_mixed._load.cache_clear()
    flashinfer_mixed.load_flash_attention_2(older)
    flashinfer_mixed.load_flash_attention_2(builder)
    assert [arguments[:2] for arguments in fake_flashinfer.loaded] == [("fa2", query)]


@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
@pytest.mark.parametrize("query", MIXED)
def test_so_they_are_on_hopper_only(
    module: Any, setting: tuple[Any, ...], query: list[int], kind: str, capability: tuple[int, int]
) -> None:
    built = made_on(capability, module, setting).build(0, metadata(query, [40 + tokens for tokens in query], DRAFTS))
    assert built.prefill.wrapper._backend == kind


def test_long_prompts_stay_flash_attention_3s(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is that of all requests: query tokens times keys, as far as the host knows of them."""
    query, exact = [4, 4, 50], [33, 17, 60]
    work = 4 * (33 + DRAFTS) + 4 * (17 + DRAFTS) + 50 * 60
    together = []
    for most in (work, work - 1):
        monkeypatch.setattr(flashinfer_mixed, "MOST_WORK", most)
        together.append(builder.build(0, metadata(query, exact, DRAFTS)).num_prefills == 3)
    assert together == [True, builder.reorder_batch_threshold == 1]


def test_the_work_of_long_prompts_is_counted_in_64_bits(builder: Any) -> None:
    mixed, given = builder._planners[-1], metadata([4, 4096], [40, 4096], DRAFTS)
    assert isinstance(mixed, flashinfer_mixed.MixedWrapper)
    bound = torch.tensor([40, 1 << 20], dtype=torch.int32)  # 2 ** 32 for the prompt
    assert mixed.takes(dataclasses.replace(given, seq_lens_cpu_upper_bound=bound)) is False
    assert mixed.takes(dataclasses.replace(metadata([4, 64], [40, 64], DRAFTS), seq_lens_cpu_upper_bound=None)) is False


def test_without_room_for_split_keys_vllm_plans_as_it_would(builder: Any, kind: str) -> None:
    give_workspace(builder, room(builder, 1, 1) - 1)
    query, exact = BATCHES["mixed"]
    for decodes in (0, 2 if builder.reorder_batch_threshold > 1 else 0):
        built = builder.build(0, metadata(query, exact, DRAFTS))
        assert (built.num_decodes, built.prefill.wrapper._backend) == (decodes, kind)


def test_vllm_may_capture_drafts(builder: Any, module: Any, setting: tuple[Any, ...]) -> None:
    spec, _, config, _ = setting
    support = module.AttentionCGSupport
    ours, upstream = type(builder), type(builder).__bases__[-1]
    assert ours.get_cudagraph_support(config, spec) is support.UNIFORM_BATCH
    if hasattr(upstream, "get_varlen_cudagraph_max_query_len"):
        asked = ours.get_varlen_cudagraph_max_query_len(config, spec)
        assert asked == upstream.get_varlen_cudagraph_max_query_len(config, spec)


@pytest.mark.parametrize("what", ["no drafts", "parallel context", "not causal", "NVFP4", "sinks", "batch invariance"])
def test_what_is_not_captured(
    builder: Any, module: Any, setting: tuple[Any, ...], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _, config, _ = setting
    if what == "no drafts":
        monkeypatch.setattr(config, "speculative_config", None)
    elif what == "parallel context":
        monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    elif what == "not causal":
        monkeypatch.setattr(config.attention_config, "use_non_causal", True, raising=False)
    elif what == "NVFP4":
        monkeypatch.setattr(config.cache_config, "cache_dtype", "nvfp4")
    elif what == "sinks":
        layer = types.SimpleNamespace(impl=types.SimpleNamespace(sinks=torch.ones(8)))
        monkeypatch.setitem(config.compilation_config.static_forward_context, "layer", layer)
    else:
        monkeypatch.setattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", True, raising=False)
    ours, upstream = type(builder), type(builder).__bases__[-1]
    assert ours.get_cudagraph_support(config, spec) is upstream.get_cudagraph_support(config, spec)
    if what in ("not causal", "sinks"):
        assert not ours(*setting)._planners


def test_the_machine_decodes_with_xqa_and_no_server_is_asked(
    module: Any, setting: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(module, "FlashInferDecodeKernel"):
        pytest.skip("this vLLM has no XQA")
    utils = importlib.import_module("vllm.utils.flashinfer")
    asked: list[bool] = []
    monkeypatch.setattr(utils, "has_nvidia_artifactory", lambda: asked.append(True))
    supports = utils.supports_trtllm_attention
    found = []
    for source in ("nvcc", None):
        supports.cache_clear()
        inspect.unwrap(supports, stop=lambda each: hasattr(each, "cache_clear") and each is not supports).cache_clear()
        monkeypatch.setattr(flashinfer_xqa, "xqa_source", lambda source=source: source)
        made = module.FlashInferBackend.get_builder_cls()(*setting)
        found.append((flashinfer_xqa_shapes.decodes_with_xqa(made), bool(asked)))
    supports.cache_clear()
    xqa = setting[2].attention_config.use_trtllm_attention is None
    assert found == [(xqa, False), (False, xqa)]


def test_every_xqa_kernel_that_a_batch_may_ask_for_is_compiled_at_the_start(builder: Any) -> None:
    fake_flashinfer.compiled.clear()
    rebuilt = type(builder)(builder.kv_cache_spec, builder.layer_names, builder.vllm_config, builder.device)
    tokens = [shape[7:] for shape in fake_flashinfer.compiled]
    if not flashinfer_xqa_shapes.decodes_with_xqa(rebuilt):
        assert tokens == []
    elif flashinfer_xqa_shapes.gives_ragged(rebuilt):
        assert sorted(tokens) == [(1,), (4,), (4, True)]
        asked = set()
        for query, exact in BATCHES.values():
            decode = rebuilt.build(0, metadata(query, exact, DRAFTS)).decode
            if decode is not None:
                asked.add((decode.q_len_per_req, True) if decode.q_cu_seq_lens is not None else (decode.q_len_per_req,))
        assert asked == {(1,), (4,), (4, True)}
    else:
        assert sorted(tokens) == [(count,) for count in range(1, 1 + rebuilt.reorder_batch_threshold)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_dtype is torch.float8_e5m2; xqa takes .* --kv-cache-dtype auto"),
        (
            {"num_qo_heads": 129, "num_kv_heads": 1},
            "group size is 129, .*; xqa takes at most 128 at head size 64, so use",
        ),
        ({"head_dim": 72}, "head_size is 72; xqa takes multiples of 16 up to 256, so use"),
        ({"page_size": 48}, "page_size is 48; xqa takes 16, 32, 64 or 128, so use --block-size 64"),
        ({"q_data_type_decode": torch.float8_e4m3fn}, "query_dtype is torch.float8_e4m3fn; xqa takes"),
        ({"is_kvcache_nvfp4": True, "kv_cache_dtype": torch.uint8}, None),
    ],
)
def test_what_xqa_does_not_take_is_left_to_wrappers_with_the_reason(
    builder: Any,
    setting: tuple[Any, ...],
    changes: dict[str, Any],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    upstream = type(builder).__bases__[-1]
    made = upstream.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        vars(self).update(changes)

    monkeypatch.setattr(upstream, "__init__", changed)
    fake_flashinfer.compiled.clear()
    if message is None or not flashinfer_xqa_shapes.decodes_with_xqa(builder):
        type(builder)(*setting)
        return
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    rebuilt = type(builder)(*setting)
    assert re.search(f"by its planned wrappers, without XQA: .*{message}", caplog.text)
    assert fake_flashinfer.compiled == []
    assert not flashinfer_xqa_shapes.decodes_with_xqa(rebuilt)
    assert rebuilt.reorder_batch_threshold == 1
    assert flashinfer_xqa_shapes.decodes_with_xqa(type(builder)(*setting)) is False, "not only the first"
    assert importlib.import_module("vllm.utils.flashinfer").supports_trtllm_attention() is True, "for other shapes"


def test_an_fp8_e5m2_cache_is_captured_as_without_xqa(
    builder: Any, module: Any, setting: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock vLLM serves such a cache on a Hopper that reaches no artifact server: by wrappers."""
    spec, _, config, _ = setting
    ours, upstream = type(builder), type(builder).__bases__[-1]
    asked = []

    def support(cls: Any, vllm_config: Any, kv_cache_spec: Any) -> Any:
        asks = getattr(module, "supports_trtllm_attention", None)  # which decides about XQA from 0.25 on
        asked.append(asks and asks(is_prefill=False))
        return module.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    monkeypatch.setattr(upstream, "get_cudagraph_support", classmethod(support))
    for cache in ("auto", "fp8_e5m2", "fp8"):
        monkeypatch.setattr(config.cache_config, "cache_dtype", cache)
        ours.get_cudagraph_support(config, spec)
    xqa = flashinfer_xqa_shapes.decodes_with_xqa(builder)
    assert asked == ([True, False, True] if xqa else asked)


def test_a_ragged_mask_is_upstreams(builder: Any, module: Any) -> None:
    if not hasattr(module, "_make_xqa_ragged_draft_block_mask"):
        pytest.skip("this vLLM gives XQA uniform batches only")
    counts = [1, 4, 0, 3]
    expected = module._make_xqa_ragged_draft_block_mask(counts, 4, True, builder.device)
    got = builder._get_decode_mask(4, np.array(counts), len(counts), True)
    assert got.dtype == expected.dtype
    assert torch.equal(got.int(), expected.int())


@pytest.mark.parametrize("batch", ["one token each", "mixed", "padded"])
def test_without_a_bound_by_request_the_longest_bounds_all(builder: Any, batch: str) -> None:
    reset_sync_report()
    query, exact = BATCHES[batch]
    given = dataclasses.replace(metadata(query, exact, 0), max_seq_len=max(exact) + 2)
    given.seq_lens_cpu_upper_bound = None
    with sync_policy("error"):
        built = builder.build(0, given)
    assert (sync_report().count, sync_report().fallbacks) == (0, {})
    first = built_on_device(built)
    assert_before_empty((each.lengths(PAGE) for each in wrappers(built)), exact[first:])
    pages = -(-(max(exact) + 2) // PAGE)
    assert_before_empty(map(pages_planned, wrappers(built)), [pages] * (len(exact) - first))


def test_what_can_not_be_planned_from_the_bound_is_counted(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "is_kvcache_nvfp4", True, raising=False)
    reset_sync_report()
    given = metadata(*BATCHES["mixed"], DRAFTS)
    built = builder.build(0, given)
    assert sync_report().fallbacks == {"NVFP4 KV cache": 1}
    assert [length for each in wrappers(built) for length in each.lengths(PAGE)] == given.seq_lens.tolist()[
        built_on_device(built) :
    ]


@pytest.mark.parametrize(
    ("context_parallel", "common_prefix", "reason"),
    [(True, 0, "decode context parallelism"), (False, PAGE, "cascade attention")],
)
def test_so_is_what_vllm_builds_from_exact_lengths(
    builder: Any, context_parallel: bool, common_prefix: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_to_vllm = []

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        given_to_vllm.append(common_attn_metadata)
        return types.SimpleNamespace(num_decodes=0, decode=None, prefill=None)

    monkeypatch.setattr(type(builder).__bases__[-1], "build", build)
    monkeypatch.setattr(builder, "use_dcp", context_parallel)
    given = metadata(*BATCHES["mixed"], DRAFTS)
    reset_sync_report()
    builder.build(common_prefix, given)
    assert sync_report().fallbacks == {reason: 1}
    assert given_to_vllm[0] is given


def test_the_benchmark_of_plans_builds_with_and_without_one(
    module: Any, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    plan = fake_flashinfer.Wrapper.plan
    monkeypatch.setattr(
        fake_flashinfer.Wrapper, "plan", lambda self, **given: (planned.append(self), plan(self, **given))
    )
    before = module.FlashInferBackend.get_builder_cls()
    cpu = torch.device("cpu")
    steps = plan_time.steps_of(plan_time.builders_of(module, cpu), cpu, 3)
    assert module.FlashInferBackend.get_builder_cls() is before, "the plugin stays as it was"
    plans = {}
    for name, step in steps.items():
        planned.clear()
        for _ in range(6):
            step()
        plans[name] = len(planned)
    xqa = {"stock, XQA": 0} if tuple(map(int, release.split("."))) >= (0, 30) else {}
    assert plans == {"stock, planned": 6, "plugin, planned in each step": 6, "plugin": 0} | xqa
    found = {"requests": {"1": {name: {"median": 9.6, "least": 1, "most": 20} for name in steps}}}
    assert list(plan_time.rows(found)) == [(name, "10 (1-20)") for name in steps]
    assert plan_time.columns(found) == ("builder, by requests", "1")
