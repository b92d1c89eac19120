"""Which kernel each batch gets of vLLM's FlashInfer builder with the plugin."""

from typing import Any

import fake_flashinfer
import pytest
import torch
from flashinfer_built import DRAFTS, built_on_device, change_new_builders, made_on, metadata, wrappers

from vllm_async_spec.compat.builder_inputs import HOPPER
from vllm_async_spec.vllm_plugin.patches import flashinfer_builder, flashinfer_xqa_shapes


def kernel(builder: Any, query: list[int]) -> str:
    built = builder.build(0, metadata(query, [40 * (tokens > 0) for tokens in query], DRAFTS))
    if built_on_device(built):
        return "xqa"
    (wrapper,) = wrappers(built)
    return f"{wrapper._backend} in a graph" if wrapper.is_cuda_graph_enabled else wrapper._backend


@pytest.mark.parametrize("query", [[4], [4] * 4, [4, 4, 4, 0], [4, 0, 0, 0], [2, 2], [4] * 5, [4, 4, 4, 4, 0], [4] * 8])
def test_drafts_are_flash_attention_2s(builder: Any, query: list[int]):
    assert kernel(builder, query) == "fa2 in a graph"


@pytest.mark.parametrize("group", [1, 16, 17])
def test_xqa_keeps_drafts_whose_rows_take_the_widest_pieces_of_work(
    module: Any, setting: tuple[Any, ...], group: int, monkeypatch: pytest.MonkeyPatch
):
    """Four tokens in groups of 16 heads are 64 rows, in groups of 17 more."""
    told: list[str] = []
    monkeypatch.setattr(flashinfer_builder, "inform", told.append)
    flashinfer_builder._say.cache_clear()
    change_new_builders(module, monkeypatch, lambda made: setattr(made, "num_qo_heads", group * made.num_kv_heads))
    for _ in range(2):  # a drafter has a builder too
        builder = made_on(HOPPER, module, setting)
    if builder.reorder_batch_threshold == 1:
        pytest.skip("there is no XQA, and FlashAttention 2 has all drafts")
    assert kernel(builder, [4] * 2) == ("xqa" if group == 17 else "fa2 in a graph")
    assert told == (
        []
        if group == 17
        else ["vllm-async-spec: FlashAttention 2 verifies drafts in CUDA graphs; XQA runs the other decodes"]
    )


@pytest.mark.parametrize("query", [[4, 2, 4, 4], [4, 1], [1, 4]])
def test_so_are_drafts_of_different_numbers(builder: Any, query: list[int], kind: str):
    if builder.reorder_batch_threshold > 1:
        assert kernel(builder, query) == "xqa"
    else:
        prefills = builder.build(0, metadata(query, [40] * len(query), DRAFTS)).prefill.wrapper
        assert (prefills._backend, prefills.is_cuda_graph_enabled) == (kind, False)


@pytest.mark.parametrize("requests", [1, 4])
def test_xqa_decodes_single_tokens_and_flashinfer_chooses_for_prompts(builder: Any, requests: int, kind: str):
    assert kernel(builder, [2 + DRAFTS] * requests) == kind
    xqa = flashinfer_xqa_shapes.decodes_with_xqa(builder)
    assert kernel(builder, [1] * requests) == ("xqa" if xqa else f"{kind} in a graph")


@pytest.mark.parametrize("changed", [(8, 9), (12, 0), torch.float8_e4m3fn])
def test_with_other_gpus_and_caches_nothing_is_chosen_by_the_plugin(
    module: Any, setting: tuple[Any, ...], kind: str, changed: Any, monkeypatch: pytest.MonkeyPatch
):
    if isinstance(changed, torch.dtype):
        change_new_builders(module, monkeypatch, lambda made: setattr(made, "kv_cache_dtype", changed))
        builder = module.FlashInferBackend.get_builder_cls()(*setting)
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
        assert wrapper.asked == ("fa2" if kind == "fa2" and not isinstance(changed, torch.dtype) else "auto")
        # FlashAttention 3 plans from each length, FlashAttention 2 from pages alone.
        assert len(wrapper.plans) == 2
        given = wrapper.plans[-1].get("seq_lens")
        assert given is None or len(given) == (1 if wrapper._backend == "fa2" else 2)
