"""XQA in vLLM's FlashInfer builder with the plugin."""

import importlib
import inspect
import logging
import re
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from flashinfer_built import BATCHES, DRAFTS, change_new_builders, metadata

from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.patches import flashinfer_xqa, flashinfer_xqa_shapes


def test_the_machine_decodes_with_xqa_and_no_server_is_asked(
    module: Any, setting: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
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


def test_every_xqa_kernel_that_a_batch_may_ask_for_is_compiled_at_the_start(builder: Any):
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
    module: Any,
    setting: tuple[Any, ...],
    changes: dict[str, Any],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    change_new_builders(module, monkeypatch, lambda made: vars(made).update(changes))
    fake_flashinfer.compiled.clear()
    if message is None or not flashinfer_xqa_shapes.decodes_with_xqa(builder):
        type(builder)(*setting)
        return
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    rebuilt = type(builder)(*setting)
    assert re.search(f"with its planned wrappers, not with XQA: .*{message}", caplog.text)
    assert fake_flashinfer.compiled == []
    assert not flashinfer_xqa_shapes.decodes_with_xqa(rebuilt)
    assert rebuilt.reorder_batch_threshold == 1
    assert flashinfer_xqa_shapes.decodes_with_xqa(type(builder)(*setting)) is False, "not only the first"
    assert importlib.import_module("vllm.utils.flashinfer").supports_trtllm_attention() is True, "for other shapes"


def test_an_fp8_e5m2_cache_is_captured_as_without_xqa(
    builder: Any, module: Any, setting: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
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


def test_a_ragged_mask_is_upstreams(builder: Any, module: Any):
    if not hasattr(module, "_make_xqa_ragged_draft_block_mask"):
        pytest.skip("this vLLM gives XQA uniform batches only")
    counts = [1, 4, 0, 3]
    expected = module._make_xqa_ragged_draft_block_mask(counts, 4, True, builder.device)
    got = builder._get_decode_mask(4, np.array(counts), len(counts), True)
    assert got.dtype == expected.dtype
    assert torch.equal(got.int(), expected.int())


@pytest.mark.parametrize(("method", "single"), [("eagle", True), ("mtp", True), ("dflash", False), ("ngram", False)])
def test_one_graph_may_replay_all_draft_steps_of_one_token(
    builder: Any, setting: tuple[Any, ...], method: str, single: bool, monkeypatch: pytest.MonkeyPatch
):
    if not hasattr(type(builder), "supports_draft_decode_metadata_update"):
        pytest.skip("this vLLM replays a graph for each draft step")
    monkeypatch.setattr(setting[2].speculative_config, "method", method)
    made = type(builder)(*setting)
    assert made.supports_draft_decode_metadata_update is (single and flashinfer_xqa_shapes.decodes_with_xqa(made))
    if made.supports_draft_decode_metadata_update:
        given = metadata([1, 1], [33, 17], DRAFTS)
        first = made.build(0, given).decode
        given.seq_lens.add_(1)  # as vLLM does in place between draft steps
        made.update_draft_decode_metadata(first)
        second = made.build(0, given).decode
        for name, value in vars(first).items():
            other = getattr(second, name)
            if isinstance(value, torch.Tensor):
                assert (value.data_ptr(), value.shape) == (other.data_ptr(), other.shape), name
            else:
                assert value == other, name
        assert first.seq_lens.as_subclass(torch.Tensor).tolist() == [34, 18]


def test_a_subclass_that_builds_other_batches_is_asked_for_each_draft_step(
    builder: Any, setting: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    if not hasattr(type(builder), "supports_draft_decode_metadata_update"):
        pytest.skip("this vLLM replays a graph for each draft step")
    monkeypatch.setattr(setting[2].speculative_config, "method", "eagle")

    class Other(type(builder)):  # type: ignore[misc]
        def build(self, *args: Any, **more: Any) -> Any:
            return super().build(*args, **more)

    assert Other(*setting).supports_draft_decode_metadata_update is False
