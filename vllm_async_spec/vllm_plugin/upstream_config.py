"""Types of vLLM's platform and configuration that patches use; see `upstream`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch

MaybeNone: TypeAlias = Any
"""In a union, None that readers need not check for, because they only run where there is a value (as in typeshed)."""


class Platform(Protocol):
    """`current_platform`."""

    def get_device_capability(self) -> tuple[int, int] | MaybeNone:
        """Major and minor version of the compute capability; None without a device that has one."""

    def is_device_capability(self, capability: int) -> bool:
        """Whether the compute capability is this one, for example 90."""


class ParallelConfig(Protocol):
    """How the engine is spread over devices."""

    world_size: int
    tensor_parallel_size: int
    data_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    enable_eplb: bool
    """Whether experts move between ranks."""
    enable_elastic_ep: bool
    """Whether engines of data parallelism may join and leave; from 0.17 on."""

    @property
    def use_ubatching(self) -> bool:
        """Whether batches are split into micro-batches."""


class ModelConfig(Protocol):
    """The target model, or a drafter's."""

    model: str
    """Its name or path."""
    dtype: torch.dtype
    """Of weights and activations."""

    @property
    def is_hybrid(self) -> bool:
        """Whether the model also has layers without attention."""

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts; from 0.14 on."""

    def get_hidden_size(self) -> int:
        """Width of the hidden states."""

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of one rank."""


class SpeculativeConfig(Protocol):
    """Speculative decoding."""

    method: str | None
    num_speculative_tokens: int
    """Drafts of a request in each step."""
    draft_model_config: ModelConfig
    """For drafters with a model."""


class CudagraphMode(Protocol):
    """`CUDAGraphMode`, an enum."""

    @property
    def name(self) -> str:
        """Of the member; "NONE" without graphs."""

    def has_full_cudagraphs(self) -> bool:
        """Whether some graphs hold a whole forward."""


class PassConfig(Protocol):
    """Passes of the compiler."""

    enable_sp: bool
    """Whether ranks of tensor parallelism divide a step's tokens."""


class CompilationConfig(Protocol):
    """Compilation and CUDA graphs."""

    pass_config: PassConfig
    cudagraph_mode: CudagraphMode
    max_cudagraph_capture_size: int | None
    """Tokens of the largest graph."""
    static_forward_context: Mapping[str, object]
    """The attention layers, by name, once the model is built."""


class CacheConfig(Protocol):
    """The KV cache."""

    cache_dtype: str
    """As the user gave it; "auto" is the model's dtype."""
    mamba_cache_mode: str
    """Of states: "none", or with prefix caching "align" or "all"; from 0.14 on."""


class SchedulerConfig(Protocol):
    """The scheduler."""

    async_scheduling: bool | None
    max_num_seqs: int
    """Requests that run at once, at most."""
    max_num_batched_tokens: int
    """Tokens of a step, at most."""


class VllmConfig(Protocol):
    """The whole configuration of an engine."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    speculative_config: SpeculativeConfig | MaybeNone
    """None without drafts."""
    compilation_config: CompilationConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    attention_config: object
    """From 0.13 on."""
    kv_transfer_config: object
    """None if keys and values stay in this engine."""
