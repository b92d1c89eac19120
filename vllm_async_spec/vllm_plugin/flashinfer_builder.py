"""vLLM's FlashInfer backend with a metadata builder that plans from the upper bound, so that it waits for nothing.

The builder is a subclass of vLLM's. It hands vLLM's `build` the bound in place of exact lengths, and afterwards
writes the device's lengths over what was planned. It also settles which XQA kernels decoding needs: one token a
request, all drafts of every request, and a ragged batch; all are compiled when the builder is made.
"""

from __future__ import annotations

import copy
import functools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch

from vllm_async_spec.attention.flashinfer import PlanBuffers, carry_lengths, may_split
from vllm_async_spec.attention.trtllm import causal_draft_masks
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.flashinfer_xqa import compile_xqa, no_flashinfer
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.transaction import Transaction

_PLANS_IN_FLIGHT = 8
"""A step plans once for the target and at most once for each draft, and two steps are in flight; more wait, counted."""

_PLAN_BYTES = 8 << 20
"""What flashinfer-python gives each wrapper to plan in."""

_WORDS = 2
"""uint16 words of a row of XQA's draft mask, for up to 32 query tokens."""


def _unneeded(builder: Any) -> str | None:
    metadata = sys.modules[builder.__module__].CommonAttentionMetadata
    if "seq_lens_cpu_upper_bound" not in metadata.__dataclass_fields__:
        return "this vLLM's runner gives no upper bound to plan from"
    return None


def _apply(transaction: Transaction, module: ModuleType) -> None:
    builder = _device_lengths(module.FlashInferMetadataBuilder)
    transaction.set(module.FlashInferBackend, "get_builder_cls", staticmethod(lambda: builder))


def _device_lengths(upstream: type[Any]) -> type[Any]:
    """The subclass of vLLM's builder that plans from the upper bound."""

    class FlashInferMetadataBuilder(upstream):  # type: ignore[misc]
        """As vLLM's; see this module."""

        disable_split_kv: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._drafts = self.vllm_config.speculative_config is not None
            if self._drafts:
                self._plan_buffers = PlanBuffers(_PLANS_IN_FLIGHT, _PLAN_BYTES, self.device)
            self._planning: Any = None
            self._draft_masks = causal_draft_masks(torch.arange(16 * _WORDS, device="cpu"), 16 * _WORDS).numpy()
            if _decodes_with_xqa(self):
                compile_xqa(_xqa_shapes(self))

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            if not self._drafts:
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            reason = _needs_exact(self, common_prefix_len, common_attn_metadata)
            if reason is not None:
                record_fallback(reason)
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            self._planning = common_attn_metadata
            split = self.disable_split_kv
            try:
                built = super().build(common_prefix_len, _bounded(common_attn_metadata), fast_build)
            finally:
                self.disable_split_kv, self._planning = split, None
                self._plan_buffers.planned()
            lengths, decodes = common_attn_metadata.seq_lens, built.num_decodes
            for part, rows in ((built.decode, lengths[:decodes]), (built.prefill, lengths[decodes:])):
                if hasattr(part, "wrapper"):
                    carry_lengths(part.wrapper, rows, self.page_size)
            return built

        def _get_prefill_wrapper(self, *args: Any, **kwargs: Any) -> Any:
            wrapper = super()._get_prefill_wrapper(*args, **kwargs)
            # Where XQA takes a ragged batch, no request with drafts comes here.
            if self._planning is not None and not _takes_ragged(self) and may_split(wrapper):
                self.disable_split_kv |= _has_drafts(self._planning)
            return self._with_plan_buffer(wrapper)

        def _get_decode_wrapper(self, *args: Any, **kwargs: Any) -> Any:
            return self._with_plan_buffer(super()._get_decode_wrapper(*args, **kwargs))

        def _with_plan_buffer(self, wrapper: Any) -> Any:
            if self._planning is not None:
                self._plan_buffers.lend(wrapper)
            return wrapper

    if hasattr(upstream, "_compute_decode_query_lens"):
        _add_ragged_xqa(FlashInferMetadataBuilder, upstream)
    FlashInferMetadataBuilder.__qualname__ = upstream.__qualname__
    return FlashInferMetadataBuilder


def _needs_exact(builder: Any, common_prefix_len: int, metadata: Any) -> str | None:
    """Why this batch must be built from exact host lengths, in one of a few words; None if it needn't."""
    if metadata.seq_lens_cpu_upper_bound is None:
        return "no upper bound"
    if builder.use_dcp:
        return "decode context parallelism"
    if common_prefix_len > 0:
        return "cascade attention"
    if getattr(builder, "is_kvcache_nvfp4", False):
        return "NVFP4 KV cache"
    return None


class _BoundedLengths(torch.Tensor):
    """Device lengths whose copy on the host is the upper bound; whatever is computed from them is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    bound: torch.Tensor

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The bound, which is on the host already."""
        return self.bound


def _bounded(metadata: Any) -> Any:
    """A copy whose host lengths are the upper bound.

    Releases up to 0.29 read `seq_lens_cpu`; later ones copy `seq_lens` themselves.
    """
    bounded = copy.copy(metadata)
    bounded.seq_lens = metadata.seq_lens.as_subclass(_BoundedLengths)
    bounded.seq_lens.bound = metadata.seq_lens_cpu_upper_bound
    bounded._seq_lens_cpu = metadata.seq_lens_cpu_upper_bound
    return bounded


def _has_drafts(metadata: Any) -> bool:
    """Whether some request with several query tokens may be shorter than its bound: only prefills are as long."""
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    several = query_lens > 1
    if metadata.is_prefilling is not None:
        several &= ~metadata.is_prefilling.numpy()[: several.shape[0]]
    return bool(several.any())


def _decodes_with_xqa(builder: Any) -> bool:
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    return kernel is not None and kernel.value == "xqa"


def _takes_ragged(builder: Any) -> bool:
    """Whether XQA decodes, and may be given requests with different numbers of query tokens."""
    return bool(getattr(builder, "use_xqa", False) or getattr(builder, "use_dedicated_xqa", False))


def _xqa_shapes(builder: Any) -> list[tuple[Any, ...]]:
    """Arguments of `gen_xqa_module` for every kernel that decoding may ask for."""
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
    if not _takes_ragged(builder):
        return [(*shape, tokens) for tokens in range(1, most + 1)]
    shapes = [(*shape, 1)]
    return shapes if most == 1 else [*shapes, (*shape, most), (*shape, most, True)]


def _add_ragged_xqa(builder: type[Any], upstream: type[Any]) -> None:
    """Ragged batches always as wide as all drafts, which has one kernel, and their mask without a wait."""

    @functools.wraps(upstream._compute_decode_query_lens)
    def _compute_decode_query_lens(
        self: Any, qo_indptr: torch.Tensor, qo_indptr_cpu: torch.Tensor, num_decodes: int, num_decode_tokens: int
    ) -> Any:
        original = upstream._compute_decode_query_lens
        tokens, offsets, ragged = original(self, qo_indptr, qo_indptr_cpu, num_decodes, num_decode_tokens)
        most = self.reorder_batch_threshold
        if not _takes_ragged(self) or (tokens in (1, most) and ragged is None):
            return tokens, offsets, ragged
        return most, qo_indptr[: num_decodes + 1], np.diff(qo_indptr_cpu[: num_decodes + 1].numpy())

    @functools.wraps(upstream._get_decode_mask)
    def _get_decode_mask(self: Any, q_len_per_req: int, ragged_q_lens: Any, num_decodes: int, causal: bool) -> Any:
        if ragged_q_lens is None or not causal or q_len_per_req > 16 * _WORDS:
            return upstream._get_decode_mask(self, q_len_per_req, ragged_q_lens, num_decodes, causal)
        starts = np.cumsum(ragged_q_lens) - ragged_q_lens
        within = np.arange(ragged_q_lens.sum()) - np.repeat(starts, ragged_q_lens)
        mask = torch.from_numpy(self._draft_masks[within])
        return mask.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else mask

    builder._compute_decode_query_lens = _compute_decode_query_lens
    builder._get_decode_mask = _get_decode_mask


IMPLEMENTATIONS = {"flashinfer-builder": Implementation(_unneeded, _apply, no_flashinfer)}
