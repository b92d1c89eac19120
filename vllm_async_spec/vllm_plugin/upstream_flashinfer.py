"""Types of vLLM's FlashInfer backend and of flashinfer-python that patches use; see `upstream`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from vllm_async_spec.vllm_plugin.upstream import BuilderBase

if TYPE_CHECKING:
    import dataclasses

    import numpy as np
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream import BatchMetadata, CpuGpuBuffer
    from vllm_async_spec.vllm_plugin.upstream_config import MaybeNone, ModelConfig, VllmConfig


class FlashInferBackend(Protocol):
    """The class of vLLM's backend."""

    def get_dtype_for_flashinfer(self, kv_cache_dtype: str) -> torch.dtype:
        """FlashInfer's dtype of an 8-bit cache; 0.20 has it under the next name only."""

    def get_fp8_dtype_for_flashinfer(self, kv_cache_dtype: str) -> torch.dtype:
        """The same; in 0.20."""


class PlannedWrapper(Protocol):
    """`BatchPrefillWithPagedKVCacheWrapper` or `BatchDecodeWithPagedKVCacheWrapper` of flashinfer-python.

    With decode context parallelism vLLM has a wrapper of its own, without these members.
    """

    _float_workspace_buffer: torch.Tensor
    """(bytes,) uint8, device: outputs of split-KV."""
    _int_workspace_buffer: torch.Tensor
    """(bytes,) uint8, device: the plan."""
    _kv_layout: str
    _qo_indptr_last: int
    """Query tokens of the plan."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str) -> None: ...


class WrapperPart(Protocol):
    """`FIPrefill` or `FIDecode`. Other kernels have other classes, without a wrapper."""

    wrapper: PlannedWrapper


if TYPE_CHECKING:  # for the type checker, methods need no bodies

    @dataclasses.dataclass
    class FlashInferMetadata:
        """vLLM's metadata of a batch: decodes first, then prefills."""

        num_actual_tokens: int
        slot_mapping: torch.Tensor
        """(tokens,) int64, device."""
        num_decodes: int
        num_prefill_tokens: int
        prefill: WrapperPart | MaybeNone
        decode: WrapperPart | MaybeNone

    class FlashInferBuilderBase(BuilderBase):
        """`FlashInferMetadataBuilder`, from 0.20 on."""

        vllm_config: VllmConfig
        model_config: ModelConfig
        enable_cuda_graph: bool
        use_dcp: bool
        """Whether there is decode context parallelism."""
        page_size: int
        num_qo_heads: int
        num_kv_heads: int
        head_dim: int
        window_left: int
        """Tokens of the sliding window, less one; -1 without."""
        logits_soft_cap: float | None
        kv_cache_dtype: torch.dtype | str
        """A name only for NVFP4."""
        q_data_type: torch.dtype
        """Up to 0.24."""
        q_data_type_prefill: torch.dtype
        """From 0.25 on, as the next."""
        q_data_type_decode: torch.dtype
        paged_kv_indices: torch.Tensor | CpuGpuBuffer
        """(pages,) int32."""
        use_fa2_native_decode: bool
        """From 0.33 on: whether decode wrappers of FlashAttention 2 take uniform drafts."""
        reorder_batch_threshold: int
        """Most query tokens of a request that vLLM treats as a decode."""
        supports_draft_decode_metadata_update: bool
        """From 0.28 on: whether metadata of a draft step of one token a request is good for the next one too."""
        _decode_cudagraph_max_bs: int
        """Query tokens of the largest graph; only where `enable_cuda_graph`."""

        def build(
            self, common_prefix_len: int, common_attn_metadata: BatchMetadata, fast_build: bool = False
        ) -> FlashInferMetadata:
            """The metadata for the backend's layers."""

        def _get_prefill_wrapper(self, *args: object, **kwargs: object) -> PlannedWrapper: ...
        def _get_decode_wrapper(self, *args: object, **kwargs: object) -> PlannedWrapper: ...

        # From 0.25 on, with XQA. vLLM's lengths are lists; `RaggedXqa` replaces each by an array.
        def _compute_decode_query_lens(
            self, qo_indptr: torch.Tensor, qo_indptr_cpu: torch.Tensor, num_decodes: int, num_decode_tokens: int
        ) -> tuple[int, torch.Tensor | None, npt.NDArray[np.int32] | None]: ...
        def _get_decode_mask(
            self, q_len_per_req: int, ragged_q_lens: npt.NDArray[np.int32] | None, num_decodes: int, causal: bool
        ) -> torch.Tensor | None: ...

else:
    FlashInferMetadata = FlashInferBuilderBase = object
