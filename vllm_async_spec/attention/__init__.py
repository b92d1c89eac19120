"""Adapters from `CommonAttentionMetadata` to the arguments of attention kernels; one file a backend."""

from vllm_async_spec.attention.base import Adapter, HostNeed
from vllm_async_spec.attention.flash_attn import FlashAttentionAdapter, FlashAttentionArguments
from vllm_async_spec.attention.reference import ReferenceAdapter, ReferenceArguments, paged_attention
from vllm_async_spec.attention.trtllm import (
    TrtllmAdapter,
    TrtllmArguments,
    TrtllmContextArguments,
    TrtllmDecodeArguments,
    bmm_scales,
    causal_draft_masks,
)
from vllm_async_spec.attention.trtllm_shape import (
    FlashInferFeatures,
    TrtllmShape,
    UnsupportedShapeError,
    decode_kernel,
    takes_ragged,
)

__all__ = [
    "Adapter",
    "FlashAttentionAdapter",
    "FlashAttentionArguments",
    "FlashInferFeatures",
    "HostNeed",
    "ReferenceAdapter",
    "ReferenceArguments",
    "TrtllmAdapter",
    "TrtllmArguments",
    "TrtllmContextArguments",
    "TrtllmDecodeArguments",
    "TrtllmShape",
    "UnsupportedShapeError",
    "bmm_scales",
    "causal_draft_masks",
    "decode_kernel",
    "paged_attention",
    "takes_ragged",
]
