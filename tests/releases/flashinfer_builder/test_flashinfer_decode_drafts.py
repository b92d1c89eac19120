"""Drafts below SM90, where vLLM 0.33 has decode wrappers verify them."""

import importlib
from typing import Any

import pytest
from flashinfer_built import (
    BATCHES,
    DRAFTS,
    PAGE,
    built_without_a_wait,
    lengths,
    made_on,
    metadata,
    metadata_of,
    wrappers,
)

from vllm_async_spec.attention import flashinfer as adapter

BELOW_SM90 = [(7, 5), (8, 0), (8, 9)]


@pytest.fixture
def upstream_decodes(module: Any) -> None:
    if not hasattr(module, "_use_fa2_native_decode"):
        pytest.skip("in this vLLM prefill wrappers verify drafts below SM90")


@pytest.mark.parametrize("capability", BELOW_SM90)
def test_the_plugins_planners_have_all_drafts(module: Any, setting: tuple[Any, ...], capability: tuple[int, int]):
    builder = made_on(capability, module, setting)
    assert builder.reorder_batch_threshold == 1
    for query, graph in (([4, 4, 4], True), ([4, 2, 3], False), ([4, 4, 9, 40], False)):
        built = builder.build(0, metadata(query, [count + 30 for count in query], DRAFTS))
        (wrapper,) = wrappers(built)
        assert (built.num_decodes, wrapper.is_cuda_graph_enabled) == (0, graph)
        assert wrapper.split_is_right(PAGE)


@pytest.mark.usefixtures("upstream_decodes")
@pytest.mark.parametrize("capability", BELOW_SM90)
def test_stock_has_decode_wrappers_verify_them(
    module: Any, setting: tuple[Any, ...], capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """What the plugin undoes; if no vLLM does this any more, neither should the plugin."""
    ours = module.FlashInferBackend.get_builder_cls()
    monkeypatch.setattr(module.FlashInferBackend, "get_builder_cls", staticmethod(lambda: ours.__bases__[-1]))
    builder = made_on(capability, module, setting)
    assert builder.reorder_batch_threshold == 1 + DRAFTS
    built = builder.build(0, metadata([4, 4, 4], [33, 17, 50], 0))
    assert (built.num_decodes, built.decode.wrapper._q_len_per_req) == (3, 1 + DRAFTS)


@pytest.fixture
def decoding(module: Any, setting: tuple[Any, ...], upstream_decodes: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin's builder on Ampere where a drafter that is not causal keeps the plugin from planning drafts."""
    monkeypatch.setattr(setting[2].attention_config, "use_non_causal", True)
    builder = made_on((8, 0), module, setting)
    assert not builder._planners
    return builder


@pytest.mark.parametrize("slack", [0, 1, DRAFTS, 17])
@pytest.mark.parametrize("batch", ["drafts", "page boundary", "mixed", "fewer drafts"])
def test_decode_wrappers_are_planned_from_the_bound_and_mask_by_the_devices_lengths(
    decoding: Any, batch: str, slack: int
):
    query, exact = BATCHES[batch]
    built = built_without_a_wait(decoding, metadata(query, exact, slack))
    assert built.num_decodes > 0
    assert built.decode.wrapper._q_len_per_req == 1 + DRAFTS
    assert lengths(built) == exact
    assert all(each.split_is_right(PAGE) for each in wrappers(built))


def test_without_counting_their_chunks_again_they_would_be_the_bounds(decoding: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter, "_query_tokens", lambda wrapper: getattr(wrapper, "_max_q_len", 1))
    built = decoding.build(0, metadata_of("drafts", 17))
    assert not built.decode.wrapper.split_is_right(PAGE)


@pytest.mark.usefixtures("upstream_decodes")
def test_batch_invariance_leaves_graphs_and_wrappers_to_vllm(
    module: Any, setting: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", True, raising=False)
    builder = made_on((8, 0), module, setting)
    assert (builder.use_fa2_native_decode, builder.reorder_batch_threshold) == (True, 1 + DRAFTS)
    exact = [33, 17, 50]
    wrapper = builder.build(0, metadata([4, 4, 4], exact, DRAFTS)).decode.wrapper
    assert wrapper.is_cuda_graph_enabled
    assert wrapper.lengths(PAGE) == exact


def test_a_plan_for_cudnn_is_refused(decoding: Any, monkeypatch: pytest.MonkeyPatch):
    """Its kernels read lengths that nothing corrects."""
    wrapper = decoding.build(0, metadata_of("drafts")).decode.wrapper
    monkeypatch.setattr(wrapper, "_cudnn_auto", True, raising=False)
    with pytest.raises(adapter.PlanError, match="with backend 'cudnn' can't be corrected on the device"):
        decoding.build(0, metadata_of("drafts"))
