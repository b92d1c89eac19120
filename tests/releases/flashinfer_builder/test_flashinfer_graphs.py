"""CUDA graphs of vLLM's FlashInfer builder with the plugin."""

import dataclasses
import importlib
import types
from typing import Any

import pytest
import torch
from flashinfer_built import DRAFTS, PAGE, give_workspace, made_on, metadata, metadata_of, room, wrappers

from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.compat.builder_inputs import HOPPER


def test_a_graph_finds_its_plan_where_it_was_captured(builder: Any):
    (first,) = wrappers(builder.build(0, metadata_of("drafts")))
    (smaller,) = wrappers(builder.build(0, metadata_of("two tokens each")))
    (eager,) = wrappers(builder.build(0, metadata([4, 9], [20, 40], DRAFTS)))
    (again,) = wrappers(builder.build(0, metadata_of("page boundary", 17)))
    assert first is again
    assert first.is_cuda_graph_enabled
    assert smaller.is_cuda_graph_enabled
    assert not eager.is_cuda_graph_enabled
    assert first is not smaller
    for name in ("_int_workspace_buffer", "_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf"):
        assert getattr(first, name).data_ptr() == getattr(smaller, name).data_ptr()
        assert getattr(first, name).data_ptr() != getattr(eager, name).data_ptr()


def test_a_batch_is_planned_with_what_pads_it_to_the_size_of_a_graph(builder: Any):
    given = dataclasses.replace(metadata_of("padded"), num_actual_tokens=12)
    (wrapper,) = wrappers(builder.build(0, given))
    assert wrapper.is_cuda_graph_enabled
    assert wrapper._qo_indptr_buf.tolist()[:4] == [0, 4, 8, 8]
    assert set(wrapper._qo_indptr_buf.tolist()[4:]) <= {8}
    assert wrapper._qo_indptr_last == 12


@pytest.mark.parametrize("capability", [(8, 9), HOPPER])
@pytest.mark.parametrize(("requests", "tokens"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 3)])
def test_no_piece_of_work_of_a_graph_has_more_rows_than_a_request(
    module: Any, setting: tuple[Any, ...], capability: tuple[int, int], requests: int, tokens: int
):
    """FlashInfer alone has room in each for as many as one request could have: 52, not 16, for four with four."""
    builder = made_on(capability, module, setting)
    (wrapper,) = wrappers(builder.build(0, metadata([tokens] * requests, [40] * requests, DRAFTS)))
    for live in range(1, requests + 1):
        padding = [0] * (requests - live)
        builder.build(0, metadata([tokens] * live + padding, [40] * live + padding, DRAFTS))
        assert wrapper._plan_info[3] == 16


@pytest.mark.parametrize("missing", [0, 1])
def test_where_that_needs_more_room_than_there_is_or_would_be_pieces_stay_large(
    module: Any, setting: tuple[Any, ...], missing: int
):
    builder = made_on(HOPPER, module, setting)
    builder.num_qo_heads = 8 * builder.num_kv_heads
    requests = most_split(builder)
    planned = adapter.planned_requests(requests, 4, 8)
    needed = room(builder, planned, requests)
    assert needed > room(builder, requests, requests)
    given = give_workspace(builder, needed - missing)
    (wrapper,) = wrappers(builder.build(0, drafts(requests)))
    assert len(wrapper._paged_kv_last_page_len_buf) == (requests if missing else planned)
    assert wrapper._float_workspace_buffer is given
    assert wrapper._plan_info[3] == (128 if missing else 64)


def test_graphs_are_for_causal_drafts_no_larger_than_the_largest(builder: Any, monkeypatch: pytest.MonkeyPatch):
    graphs, given = builder._planners[0], metadata_of("drafts")
    assert graphs.takes(given)
    assert not graphs.takes(dataclasses.replace(given, causal=False))
    found = []
    for most in (12, 11):
        monkeypatch.setattr(graphs, "_most_tokens", most)
        found.append(graphs.takes(given))
    assert found == [True, False]


@pytest.mark.parametrize("requests", range(1, 9))
def test_a_graph_is_captured_with_the_kernel_that_its_batches_get(builder: Any, requests: int):
    captured = builder.build_for_cudagraph_capture(metadata([4] * requests, [4] * requests, 0))
    for live in range(1, requests + 1):
        padding = [0] * (requests - live)
        replayed = builder.build(0, metadata([4] * live + padding, [40] * live + padding, DRAFTS))
        assert wrappers(replayed) == wrappers(captured)


@pytest.mark.parametrize("capability", [(8, 9), HOPPER])
def test_a_plan_for_a_graph_has_room_for_keys_that_are_split(
    module: Any, setting: tuple[Any, ...], capability: tuple[int, int]
):
    """Else FlashInfer fails where it is more than vLLM's workspace."""
    builder = made_on(capability, module, setting)
    largest = most_split(builder)
    sizes = (largest, 8, 16)  # the largest first, as graphs are captured
    group = builder.num_qo_heads // builder.num_kv_heads
    needed = {requests: room(builder, adapter.planned_requests(requests, 4, group), requests) for requests in sizes}
    given = give_workspace(builder, needed[8])
    found = {}
    for requests in sizes:
        (wrapper,) = wrappers(builder.build(0, drafts(requests)))
        found[requests] = wrapper._float_workspace_buffer
        assert wrapper._plan_info[3] == 16
    assert found[8] is given
    assert found[16] is found[largest]
    assert found[16].nbytes >= needed[largest] >= needed[16] > given.nbytes


@pytest.mark.parametrize("capability", [(8, 9), HOPPER])
@pytest.mark.parametrize("live", [1, 37, 40])
def test_requests_enough_for_each_processor_keep_their_keys_whole_and_need_no_room(
    module: Any, setting: tuple[Any, ...], capability: tuple[int, int], live: int
):
    builder = made_on(capability, module, setting)
    requests = most_split(builder) + 1
    given = give_workspace(builder, 16)
    (captured,) = wrappers(builder.build(0, drafts(requests)))
    plan = captured._plan_info
    (wrapper,) = wrappers(builder.build(0, drafts(live, requests - live)))
    assert wrapper is captured
    assert wrapper._float_workspace_buffer is given
    assert wrapper._plan_info == plan
    assert (plan[0], plan[3], plan[14]) == (requests, 16, 0)
    assert wrapper._qo_indptr_buf.diff().tolist()[:requests] == [4] * live + [0] * (requests - live)
    assert wrapper.split_is_right(PAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_launching", lambda requests, rows, plan_info: plan_info)
        builder.build(0, drafts(live, requests - live, length=400))
    assert not wrapper.split_is_right(PAGE), "what FlashInfer launches beside is of requests"


def most_split(builder: Any) -> int:
    """Most requests of which some may have its keys split."""
    heads = builder.num_qo_heads, builder.num_kv_heads
    return max(n for n in range(1, 99) if adapter.keys_are_split(n, 4, *heads, builder.device))


def drafts(requests: int, padding: int = 0, length: int = 40) -> Any:
    return metadata([4] * requests + [0] * padding, [length] * requests + [0] * padding, DRAFTS)


def test_vllm_may_capture_drafts(builder: Any, module: Any, setting: tuple[Any, ...]):
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
):
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
