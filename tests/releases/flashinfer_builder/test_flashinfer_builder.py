"""vLLM's FlashInfer builder with the plugin."""

import dataclasses
import types
from typing import Any

import fake_flashinfer
import pytest
import torch
from flashinfer_built import (
    BATCHES,
    DRAFTS,
    PAGE,
    assert_before_empty,
    built_on_device,
    built_without_a_wait,
    lengths,
    metadata,
    metadata_of,
    pages_planned,
    wrappers,
)

from benchmarks import plan_time
from vllm_async_spec import reset_sync_report, sync_report
from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.vllm_plugin.patches import flashinfer_builder


@pytest.mark.parametrize("slack", [0, 1, DRAFTS, 17])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_host_plans_from_the_bound_and_kernels_mask_by_the_devices_lengths(builder: Any, batch: str, slack: int):
    query, exact = BATCHES[batch]
    given = metadata(query, exact, slack)
    built = built_without_a_wait(builder, given)
    first = built_on_device(built)
    bounds = given.seq_lens_cpu_upper_bound.tolist()[first:]
    if any(each.is_cuda_graph_enabled for each in wrappers(built)) and built.prefill is not None:
        # Such a plan is for later steps too, as far as the block table goes.
        bounds = [bound and given.block_table_tensor.shape[1] * PAGE for bound in bounds]
    assert_before_empty(pages_planned(built), [-(-bound // PAGE) for bound in bounds])
    assert_before_empty(lengths(built), exact[first:])
    assert all(each.split_is_right(PAGE) for each in wrappers(built))
    if first:
        assert type(built.decode.seq_lens) is torch.Tensor
        assert built.decode.seq_lens.tolist() == exact[: built.num_decodes]


def test_without_the_correction_kernels_would_mask_by_the_bound(builder: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flashinfer_builder, "write_exact_lengths", lambda *arguments: None)
    given = metadata_of("mixed")
    built = builder.build(0, given)
    bound = given.seq_lens_cpu_upper_bound.tolist()
    assert lengths(built) == bound[built_on_device(built) :]


@pytest.mark.parametrize("batch", ["drafts", "mixed", "padded"])
def test_without_counting_chunks_again_they_would_be_the_bounds(
    builder: Any, batch: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter, "_carry_chunks", lambda *arguments: None)
    built = builder.build(0, metadata_of(batch, 17))
    drafts_are_split = built_on_device(built) == 0 and wrappers(built)[-1]._backend == "fa2"
    assert any(not each.split_is_right(PAGE) for each in wrappers(built)) is drafts_are_split


@pytest.mark.parametrize("batch", ["drafts", "fewer drafts", "mixed", "prompts"])
def test_vllm_orders_its_batches_as_before(builder: Any, batch: str, monkeypatch: pytest.MonkeyPatch):
    threshold, seen = builder.reorder_batch_threshold, []

    def build(self: Any, *args: Any) -> Any:
        seen.append(self.reorder_batch_threshold)
        raise RuntimeError("a failing build")

    with monkeypatch.context() as patch:
        patch.setattr(type(builder).__bases__[-1], "build", build)
        with pytest.raises(RuntimeError, match="a failing build"):
            builder.build(0, metadata_of(batch))
    assert seen == [0 if batch in ("drafts", "mixed") else threshold]
    left = (threshold, None, None)
    assert (builder.reorder_batch_threshold, builder._building.batch, builder._building.planner) == left
    builder.build(0, metadata_of(batch))
    assert (builder.reorder_batch_threshold, builder._building.batch, builder._building.planner) == left


@pytest.mark.parametrize("batch", ["one token each", "mixed", "padded"])
def test_without_a_bound_by_request_the_longest_bounds_all(builder: Any, batch: str):
    query, exact = BATCHES[batch]
    given = dataclasses.replace(metadata(query, exact, 0), max_seq_len=max(exact) + 2)
    given.seq_lens_cpu_upper_bound = None
    built = built_without_a_wait(builder, given)
    first = built_on_device(built)
    assert_before_empty(lengths(built), exact[first:])
    pages = -(-(max(exact) + 2) // PAGE)
    assert_before_empty(pages_planned(built), [pages] * (len(exact) - first))


def test_what_can_not_be_planned_from_the_bound_is_counted(builder: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "is_kvcache_nvfp4", True, raising=False)
    reset_sync_report()
    given = metadata_of("mixed")
    built = builder.build(0, given)
    assert sync_report().fallbacks == {"NVFP4 KV cache": 1}
    assert lengths(built) == given.seq_lens.tolist()[built_on_device(built) :]


@pytest.mark.parametrize(
    ("context_parallel", "common_prefix", "reason"),
    [(True, 0, "decode context parallelism"), (False, PAGE, "cascade attention")],
)
def test_so_is_what_vllm_builds_from_exact_lengths(
    builder: Any, context_parallel: bool, common_prefix: int, reason: str, monkeypatch: pytest.MonkeyPatch
):
    given_to_vllm = []

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        given_to_vllm.append(common_attn_metadata)
        return types.SimpleNamespace(num_decodes=0, decode=None, prefill=None)

    monkeypatch.setattr(type(builder).__bases__[-1], "build", build)
    monkeypatch.setattr(builder, "use_dcp", context_parallel)
    given = metadata_of("mixed")
    reset_sync_report()
    builder.build(common_prefix, given)
    assert sync_report().fallbacks == {reason: 1}
    assert given_to_vllm[0] is given


def test_the_benchmark_of_plans_builds_with_and_without_one(module: Any, release: str, monkeypatch: pytest.MonkeyPatch):
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
