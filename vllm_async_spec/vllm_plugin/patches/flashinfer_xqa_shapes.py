"""Which shapes of FlashInfer's builder XQA supports, and which kernels these shapes need.

XQA compiles a kernel for each number of query tokens per request. Ragged batches always use the kernel for all drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_async_spec.attention.trtllm import causal_draft_masks
from vllm_async_spec.attention.trtllm_shape import (
    XQA,
    FlashInferFeatures,
    TrtllmShape,
    UnsupportedShapeError,
    takes_ragged,
)
from vllm_async_spec.vllm_plugin.upstream_flashinfer import FlashInferBuilderBase

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream import AttentionSpec
    from vllm_async_spec.vllm_plugin.upstream_config import Platform, VllmConfig
    from vllm_async_spec.vllm_plugin.upstream_flashinfer import FlashInferBackend

_WORDS = 2
"""uint16 words of a row of XQA's draft mask, for up to 32 query tokens."""

_DRAFT_MASKS = causal_draft_masks(torch.arange(16 * _WORDS, device="cpu"), 16 * _WORDS).numpy()


def decodes_with_xqa(builder: FlashInferBuilderBase) -> bool:
    """Whether vLLM has chosen XQA for this builder's decodes."""
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    return kernel is not None and kernel.value == "xqa"


def gives_ragged(builder: FlashInferBuilderBase) -> bool:
    """Whether vLLM gives XQA batches whose requests have different numbers of query tokens."""
    return bool(getattr(builder, "use_xqa", False) or getattr(builder, "use_dedicated_xqa", False))


def xqa_refuses(builder: FlashInferBuilderBase, platform: Platform) -> str | None:
    """The reason why XQA refuses or would misread this builder's shape; None if XQA supports it."""
    if getattr(builder, "is_kvcache_nvfp4", False):
        return None  # SM12x supports NVFP4, and the rules here are for other caches.
    return _refusal(
        capability=tuple(platform.get_device_capability()),
        page_size=builder.page_size,
        head_size=builder.head_dim,
        num_heads=builder.num_qo_heads,
        num_kv_heads=builder.num_kv_heads,
        query_dtype=builder.q_data_type_decode,
        kv_dtype=builder.kv_cache_dtype,
        query_tokens=builder.reorder_batch_threshold,
        sliding_window=None if builder.window_left < 0 else builder.window_left + 1,
    )


def xqa_takes(config: VllmConfig, kv_cache_spec: AttentionSpec, backend: FlashInferBackend, platform: Platform) -> bool:
    """Whether XQA supports the shapes of this KV cache, as far as the configuration tells before a builder exists."""
    cache: str = config.cache_config.cache_dtype
    capability = platform.get_device_capability()
    if capability is None or capability[0] not in (9, 12) or cache.startswith("nvfp4"):
        return True  # this machine has no XQA, or the rules here are for other caches
    parts = getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values()
    return not any(
        _refusal(
            capability=tuple(capability),
            page_size=spec.block_size,
            head_size=spec.head_size,
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
            num_kv_heads=spec.num_kv_heads,
            query_dtype=config.model_config.dtype,
            kv_dtype=_eight_bits(backend, cache) if cache.startswith("fp8") else spec.dtype,
            query_tokens=1 + getattr(config.speculative_config, "num_speculative_tokens", 0),
            sliding_window=getattr(spec, "sliding_window", None),
        )
        for spec in parts
        if hasattr(spec, "num_kv_heads")  # attention layers; other layers have caches too
    )


def _eight_bits(backend: FlashInferBackend, cache: str) -> torch.dtype:
    """The dtype of an 8-bit cache, from vLLM's own function, which has another name in 0.20."""
    known = hasattr(backend, "get_dtype_for_flashinfer")
    return (backend.get_dtype_for_flashinfer if known else backend.get_fp8_dtype_for_flashinfer)(cache)


def _refusal(**shape: Any) -> str | None:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    features = FlashInferFeatures(ragged_xqa=takes_ragged(xqa_batch_decode_with_kv_cache), large_pages=False)
    try:
        TrtllmShape(kernel=XQA, features=features, **shape)
    except UnsupportedShapeError as error:
        return str(error)
    return None


def xqa_shapes(builder: FlashInferBuilderBase) -> Sequence[tuple[object, ...]]:
    """Arguments of `gen_xqa_module` for every kernel that decoding may need."""
    shape = (
        builder.q_data_type_decode,
        builder.kv_cache_dtype,
        builder.page_size,
        builder.head_dim,
        builder.num_qo_heads // builder.num_kv_heads,
        builder.window_left >= 0,
        builder.model_config.dtype,
    )
    most = builder.reorder_batch_threshold
    if not gives_ragged(builder):
        return [(*shape, tokens) for tokens in range(1, most + 1)]
    shapes = [(*shape, 1)]
    return shapes if most == 1 else [*shapes, (*shape, most), (*shape, most, True)]


class RaggedXqa(FlashInferBuilderBase):
    """Widens ragged batches to all drafts, so that they need one kernel, and makes their mask without a host wait."""

    def _compute_decode_query_lens(
        self, qo_indptr: torch.Tensor, qo_indptr_cpu: torch.Tensor, num_decodes: int, num_decode_tokens: int
    ) -> tuple[int, torch.Tensor | None, npt.NDArray[np.int32] | None]:
        original = super()._compute_decode_query_lens
        tokens, offsets, ragged = original(qo_indptr, qo_indptr_cpu, num_decodes, num_decode_tokens)
        most = self.reorder_batch_threshold
        if not gives_ragged(self) or (tokens in (1, most) and ragged is None):
            return tokens, offsets, ragged
        return most, qo_indptr[: num_decodes + 1], np.diff(qo_indptr_cpu[: num_decodes + 1].numpy())

    def _get_decode_mask(
        self, q_len_per_req: int, ragged_q_lens: npt.NDArray[np.int32] | None, num_decodes: int, causal: bool
    ) -> torch.Tensor | None:
        if ragged_q_lens is None or not causal or q_len_per_req > 16 * _WORDS:
            return super()._get_decode_mask(q_len_per_req, ragged_q_lens, num_decodes, causal)
        starts = np.cumsum(ragged_q_lens) - ragged_q_lens
        within = np.arange(ragged_q_lens.sum()) - np.repeat(starts, ragged_q_lens)
        mask = torch.from_numpy(_DRAFT_MASKS[within])
        return mask.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else mask
