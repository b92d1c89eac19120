"""Drafts and prompts in one batch of vLLM's FlashInfer builder with the plugin."""

import dataclasses
import types
from typing import Any

import fake_flashinfer
import pytest
import torch
from flashinfer_built import BATCHES, DRAFTS, give_workspace, made_on, metadata, room, warmed, wrappers

from vllm_async_spec.vllm_plugin.patches import flashinfer_mixed

MIXED = [[4, 9], [4, 4, 9, 40], [1, 1, 9], [1, 4, 2, 40], [4] * 7 + [30]]


def with_context(query: list[int]) -> Any:
    return metadata(query, [40 + tokens for tokens in query], DRAFTS)


@pytest.mark.parametrize("query", MIXED)
def test_drafts_and_short_prompts_are_planned_together(builder: Any, query: list[int]):
    built = builder.build(0, with_context(query))
    assert (built.num_decodes, built.num_prefills, built.num_prefill_tokens) == (0, len(query), sum(query))
    (wrapper,) = wrappers(built)
    assert (wrapper._backend, wrapper.is_cuda_graph_enabled) == ("fa2", False)


def test_the_warm_up_loads_what_long_prompts_need(module: Any, setting: tuple[Any, ...], kind: str):
    builder = module.FlashInferBackend.get_builder_cls()(*setting)
    found = [builder.build(0, metadata([1, 9], [3, 9], 0)).prefill.wrapper._backend for _ in range(3)]
    assert found == [kind, "fa2", "fa2"]


def test_flash_attention_2_is_loaded_before_the_first_request(
    module: Any, setting: tuple[Any, ...], kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fake_flashinfer, "loaded", [])
    flashinfer_mixed._load.cache_clear()
    builder = module.FlashInferBackend.get_builder_cls()(*setting)
    loaded = list(fake_flashinfer.loaded)
    for query in ([4, 4], *MIXED):
        (*_, wrapper) = wrappers(warmed(builder).build(0, with_context(query)))
        assert [wrapper.module] == loaded


def test_where_queries_have_one_dtype_it_is_loaded_for_that(builder: Any, monkeypatch: pytest.MonkeyPatch):
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
):
    built = made_on(capability, module, setting).build(0, with_context(query))
    assert built.prefill.wrapper._backend == kind


def test_long_prompts_stay_flash_attention_3s(builder: Any, monkeypatch: pytest.MonkeyPatch):
    """The work is that of all requests: query tokens times keys, as far as the host knows of them."""
    query, exact = [4, 4, 50], [33, 17, 60]
    work = 4 * (33 + DRAFTS) + 4 * (17 + DRAFTS) + 50 * 60
    together = []
    for most in (work, work - 1):
        monkeypatch.setattr(flashinfer_mixed, "MOST_WORK", most)
        together.append(builder.build(0, metadata(query, exact, DRAFTS)).num_prefills == 3)
    assert together == [True, builder.reorder_batch_threshold == 1]


def test_the_work_of_long_prompts_is_counted_in_64_bits(builder: Any):
    mixed, given = builder._planners[-1], metadata([4, 4096], [40, 4096], DRAFTS)
    assert isinstance(mixed, flashinfer_mixed.MixedWrapper)
    bound = torch.tensor([40, 1 << 20], dtype=torch.int32)  # 2 ** 32 for the prompt
    assert mixed.takes(dataclasses.replace(given, seq_lens_cpu_upper_bound=bound)) is False
    assert mixed.takes(dataclasses.replace(metadata([4, 64], [40, 64], DRAFTS), seq_lens_cpu_upper_bound=None)) is False


def test_without_room_for_split_keys_vllm_plans_as_it_would(builder: Any, kind: str):
    give_workspace(builder, room(builder, 1, 1) - 1)
    query, exact = BATCHES["mixed"]
    for decodes in (0, 2 if builder.reorder_batch_threshold > 1 else 0):
        built = builder.build(0, metadata(query, exact, DRAFTS))
        assert (built.num_decodes, built.prefill.wrapper._backend) == (decodes, kind)
