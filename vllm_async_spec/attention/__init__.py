"""Adapters from `CommonAttentionMetadata` to the arguments of attention kernels; one file a backend."""

from vllm_async_spec.attention.base import (
    Adapter,
    HostNeed,
    UnknownAdapterError,
    adapters,
    get_adapter,
    register_adapter,
)
from vllm_async_spec.attention.flash_attn import FlashAttentionAdapter, FlashAttentionArguments
from vllm_async_spec.attention.reference import ReferenceAdapter, ReferenceArguments, paged_attention

__all__ = [
    "Adapter",
    "FlashAttentionAdapter",
    "FlashAttentionArguments",
    "HostNeed",
    "ReferenceAdapter",
    "ReferenceArguments",
    "UnknownAdapterError",
    "adapters",
    "get_adapter",
    "paged_attention",
    "register_adapter",
]
