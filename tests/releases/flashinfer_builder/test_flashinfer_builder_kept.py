"""Plans that vLLM's FlashInfer builder keeps with the plugin."""

import dataclasses
from typing import Any

import fake_flashinfer
import pytest
import torch
from flashinfer_built import DRAFTS, LONGEST, PAGE, assert_before_empty, made_on, metadata, wrappers

from vllm_async_spec.compat.builder_inputs import HOPPER
from vllm_async_spec.vllm_plugin.patches import flashinfer_graphs


def drafts(exact: list[int], padding: int = 0, tokens: int = 1 + DRAFTS) -> Any:
    given = metadata([tokens] * len(exact) + [0] * padding, exact + [0] * padding, DRAFTS)
    table = torch.randint(1, 10_000, (given.num_reqs, LONGEST // PAGE), dtype=torch.int32)
    return dataclasses.replace(given, block_table_tensor=table)


def pages_read(wrapper: fake_flashinfer.Wrapper, requests: int) -> list[list[int]]:
    starts, indices = wrapper._paged_kv_indptr_buf.tolist(), wrapper._paged_kv_indices_buf.tolist()
    pages = [-(-length // PAGE) for length in wrapper.lengths(PAGE)[:requests]]
    return [indices[start : start + count] for start, count in zip(starts, pages, strict=False)]


def test_a_plan_serves_until_a_request_outgrows_it(builder: Any):
    exact, counts = [33, 17, 250], []
    for _ in range(45):
        given = drafts(exact)
        built = builder.build(0, given)
        (wrapper,) = wrappers(built)
        assert_before_empty(wrapper.lengths(PAGE), exact)
        assert wrapper.split_is_right(PAGE)
        if counts and len(wrapper.plans) == counts[-1]:
            table = given.block_table_tensor.tolist()
            assert pages_read(wrapper, 3) == [table[row][: -(-length // PAGE)] for row, length in enumerate(exact)]
        counts.append(len(wrapper.plans))
        exact = [length + (1 + DRAFTS if row == 1 else 1) for row, length in enumerate(exact)]
    ahead = flashinfer_graphs.AHEAD // (1 + DRAFTS)
    assert counts == [1] * (ahead + 1) + [2] * (44 - ahead)


def test_what_is_built_of_an_older_plan_is_what_vllm_would_build(builder: Any, module: Any, setting: tuple[Any, ...]):
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
def test_a_plan_serves_no_other_batch(builder: Any, other: str):
    first, then = (make() for make in OTHERS[other])
    # And the other's is none for the first, whose wrapper shares its buffers.
    for given in (first, then, first):
        before = [len(each.plans) for each in builder._planners[0]._by_size.values()]
        (wrapper,) = wrappers(builder.build(0, given))
        assert sum(len(each.plans) for each in builder._planners[0]._by_size.values()) == 1 + sum(before)
        assert_before_empty(wrapper.lengths(PAGE), given.seq_lens.tolist())
        assert wrapper.split_is_right(PAGE)


@pytest.mark.parametrize("requests", [1, 8])
def test_no_request_is_looked_at_in_python_to_plan_flash_attention_2(builder: Any, requests: int):
    """FlashInfer calls Python's `max` on lengths, and on query lengths unless it is told of the most."""
    (wrapper,) = wrappers(builder.build(0, drafts([33] * (requests - 1) + [250])))
    plan, most = wrapper.plans[-1], -(-(250 + DRAFTS + AHEAD) // PAGE) * PAGE
    assert wrapper._backend == "fa2"
    assert (plan["seq_lens"].tolist(), plan["max_token_per_sequence"]) == ([most], 1 + DRAFTS)


def test_what_was_kept_of_a_plan_goes_with_it(builder: Any):
    (wrapper,) = wrappers(builder.build(0, drafts([33, 17, 250])))
    assert (wrapper.kept is None) is (wrapper._backend == "fa3")
    wrapper.kept = ()
    wrapper.plan(**{name: value for name, value in wrapper.plans[-1].items() if name != "buffer"})
    assert wrapper.kept is None


@pytest.mark.parametrize("interruption", ["exact lengths", "a failing build", "a batch outside graphs"])
def test_a_plan_that_was_written_over_serves_no_more(builder: Any, interruption: str, monkeypatch: pytest.MonkeyPatch):
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


def test_a_plan_that_is_not_kept_has_too_few_chunks_for_later_steps(builder: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flashinfer_graphs, "keep_plan", lambda *arguments: None)
    builder.build(0, drafts([33, 17, 50]))
    (wrapper,) = wrappers(builder.build(0, drafts([80, 17, 50])))
    assert wrapper.split_is_right(PAGE) is (wrapper._backend == "fa3")
