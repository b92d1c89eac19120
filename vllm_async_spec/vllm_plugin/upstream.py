"""Types of the vLLM objects that patches use, for readers and for the type checker.

A Protocol lists only the members of vLLM's class that patches read or call. Each member exists, with this type, in all
releases of the patches that use the member. Members of only some releases are read with `getattr`, or say so here and
are read after `hasattr`. A `...Base` class replaces vLLM's class as the base of a patch's class for the type checker.
Configurations are in `upstream_config`, FlashInfer's types in `upstream_flashinfer`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from vllm_async_spec.vllm_plugin.upstream_config import (
        CacheConfig,
        CompilationConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )


class CpuGpuBuffer(Protocol):
    """A pinned host tensor, and the device tensor for its copies."""

    cpu: torch.Tensor
    gpu: torch.Tensor
    np: npt.NDArray[Any]
    """The memory of `cpu`."""

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Start a copy of the first `n` elements, or of all."""


class BlockTable(Protocol):
    """The pages of one KV cache group."""

    block_table: CpuGpuBuffer
    """(requests, pages) int32."""
    block_size: int
    """Tokens of a page."""
    slot_mapping: CpuGpuBuffer
    """(tokens,) int64."""

    def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
        """(num_reqs, pages) int32, device."""


class MultiGroupBlockTable(Protocol):
    """The pages of all KV cache groups."""

    block_tables: Sequence[BlockTable]

    def __getitem__(self, idx: int) -> BlockTable:
        """Those of one group."""

    def append_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        """Add pages of each group to a row."""

    def commit_block_table(self, num_reqs: int) -> None:
        """Start copies of the first rows' pages to the device."""

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the slots of a step's tokens, on the device; these arguments from 0.19 on."""


class SamplingMetadata(Protocol):
    """The sampler's parameters for a batch."""

    output_token_ids: list[list[int]]
    """Empty unless penalties or a logits processor read them."""


class LogitsProcessors(Protocol):
    """The logits processors of a batch."""

    @property
    def all(self) -> Sequence[Any]:
        """Each of them, of any class."""


class InputBatch(Protocol):
    """The V1 runner's persistent batch."""

    req_ids: Sequence[str]
    """By row, for the rows that are in use."""
    req_id_to_index: Mapping[str, int]
    num_reqs: int
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    """(rows,), host."""
    num_computed_tokens_cpu_tensor: torch.Tensor
    """The same memory."""
    num_prompt_tokens: npt.NDArray[np.int32]
    """(rows,), host."""
    num_tokens_no_spec: npt.NDArray[np.int32]
    """(rows,), host: tokens of each request, without drafts."""
    block_table: MultiGroupBlockTable
    prev_sampled_token_ids: torch.Tensor | None
    """(rows of the last step, 1 or more) int32, device."""
    prev_req_id_to_index: Mapping[str, int]
    """Rows of the last step."""
    no_penalties: bool
    bad_words_token_ids: Mapping[int, list[list[int]]]
    sampling_metadata: SamplingMetadata
    logitsprocs: LogitsProcessors


class CachedRequestState(Protocol):
    """The runner's state of a request."""

    prev_num_draft_len: int
    """Drafts that the last step verified."""
    output_token_ids: list[int]
    """-1 for tokens that only the device knows."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the output."""


class CachedRequestData(Protocol):
    """The requests of a step that the runner already knows. All sequences have the same order."""

    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]
    num_output_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    """The requests and tokens that a step computes."""

    total_num_scheduled_tokens: int
    scheduled_cached_reqs: CachedRequestData
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    """Drafts by request; -1 for drafts that only the device knows."""


class SpecDecodeMetadata(Protocol):
    """Which tokens of a step are drafts."""

    draft_token_ids: torch.Tensor
    """(drafts,) int32, device."""
    logits_indices: torch.Tensor
    """(sampled tokens,), device: tokens of the step whose logits are computed."""
    target_logits_indices: torch.Tensor
    """(drafts,), device: for each draft its row of these logits."""


class BatchMetadata(Protocol):
    """`CommonAttentionMetadata`: a batch as metadata builders get it."""

    query_start_loc: torch.Tensor
    """(requests + 1,) int32, device."""
    query_start_loc_cpu: torch.Tensor
    """(requests + 1,) int32, host."""
    seq_lens: torch.Tensor
    """(requests,) int32, device."""
    seq_lens_cpu_upper_bound: torch.Tensor | None
    """(requests,) int32, host; from 0.20 on."""
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    """(requests, pages) int32, device."""
    slot_mapping: torch.Tensor
    """(tokens,) int64, device."""
    causal: bool


class AttentionSpec(Protocol):
    """The KV cache of an attention layer. Layers of other kinds have no `num_kv_heads`."""

    block_size: int
    """Tokens of a page."""
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    """Of what is stored: `torch.uint8` for most 8-bit caches."""


class AttentionBackend(Protocol):
    """The class of an attention backend."""

    @staticmethod
    def get_name() -> str:
        """For example FLASH_ATTN."""


class AttentionGroup(Protocol):
    """Layers of one KV cache group with the same backend."""

    backend: AttentionBackend
    kv_cache_spec: object
    metadata_builders: Sequence[object]
    """One per micro-batch."""


class KVCacheConfig(Protocol):
    """The allocated KV cache."""

    kv_cache_groups: Sequence[object]


class Proposer(Protocol):
    """`SpecDecodeBaseProposer`, in 0.14 `EagleProposer`: a drafter with a model."""

    propose: Callable[..., torch.Tensor]
    """Returns (requests, drafts) int64, device."""
    vllm_config: VllmConfig
    cudagraph_dispatcher: Any
    """Its `dispatch` gives the kind of graph for a number of tokens, and the padded number; from 0.17 on."""
    model: Any
    """The draft model, whose modules differ by architecture."""
    num_speculative_tokens: int
    hidden_size: int
    max_model_len: int
    max_num_tokens: int
    """Tokens of the largest batch."""
    supports_mm_inputs: bool
    tree_choices: Sequence[tuple[int, ...]]
    """The path to each draft; all zeros if the drafts are a chain."""
    backup_next_token_ids: CpuGpuBuffer
    """(requests,) int32."""
    draft_attn_groups: Sequence[AttentionGroup]
    """From 0.17 on."""
    attn_metadata_builder: object
    """Up to 0.16; None until the first step."""
    draft_indexer_metadata_builder: object
    """Up to 0.16; None for models without an indexer."""

    def _get_attention_metadata_builder(self) -> object:
        """The builder of the drafter's layers; up to 0.16."""


class ModelRunner(Protocol):
    """`GPUModelRunner`, V1 or V2."""

    vllm_config: VllmConfig
    model: torch.nn.Module
    attn_groups: Sequence[Sequence[AttentionGroup]]
    """Empty until there is a KV cache."""


class Worker(Protocol):
    """The worker of one device."""

    rank: int
    model_runner: ModelRunner


class WorkerWrapper(Protocol):
    """`WorkerWrapperBase`: makes the worker of one process."""

    worker: Worker


class EngineCore(Protocol):
    """Schedules steps, and has its executor run them."""

    scheduler: object


class EngineClient(Protocol):
    """The engine as its server sees it."""

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""

    async def collective_rpc(self, method: str, *, args: tuple[str, ...]) -> list[str]:
        """What the engine core's method of that name returned; for audits, JSON."""


class HttpState(Protocol):
    """What the server has stored in its application; other members differ by release."""

    engine_client: object
    """None without an engine."""


class HttpApp(Protocol):
    """The FastAPI application of a server."""

    @property
    def state(self) -> HttpState:
        """What the server stored."""

    def add_route(self, path: str, route: Callable[[Request], Awaitable[ASGIApp]], methods: list[str]) -> None:
        """Call `route` for such requests, then what it returned."""


if TYPE_CHECKING:  # for the type checker, methods need no bodies

    class RunnerBase:
        """`GPUModelRunner` of the V1 runner, 0.14 to 0.29."""

        device: torch.device
        max_num_reqs: int
        max_num_tokens: int
        num_spec_tokens: int
        dtype: torch.dtype
        vllm_config: VllmConfig
        parallel_config: ParallelConfig
        speculative_config: SpeculativeConfig | None
        model_config: ModelConfig
        cache_config: CacheConfig
        compilation_config: CompilationConfig
        lora_config: object
        """None without adapters."""
        kv_cache_config: KVCacheConfig
        """Only once there is a KV cache."""
        use_async_scheduling: bool
        dcp_world_size: int
        enable_prompt_embeds: bool
        is_multimodal_pruning_enabled: bool
        input_batch: InputBatch
        requests: Mapping[str, CachedRequestState]
        attn_groups: Sequence[Sequence[AttentionGroup]]
        """Empty until there is a KV cache."""
        drafter: Proposer
        """Only with drafts; those without a model lack most members."""
        cascade_attn_enabled: bool
        supports_mm_inputs: bool
        is_mm_embed_buffers: Sequence[CpuGpuBuffer]
        """Only where `supports_mm_inputs`."""
        is_mm_embed_idx: int
        uses_mrope: bool
        mrope_positions: CpuGpuBuffer
        """(3, tokens) int64; only where `uses_mrope`."""
        uses_xdrope_dim: int
        xdrope_positions: CpuGpuBuffer
        """(`uses_xdrope_dim`, tokens) int64; only where that is above 0."""
        input_ids: CpuGpuBuffer
        """(tokens,) int32."""
        positions: CpuGpuBuffer
        """(tokens,) int64."""
        seq_lens: CpuGpuBuffer
        """(requests,) int32."""
        query_start_loc: CpuGpuBuffer
        """(requests + 1,) int32."""
        prev_positions: CpuGpuBuffer
        """(requests,): each row's row of the last step, or -1; from 0.19 on."""
        prepare_inputs_event: object
        """A `torch.Event`, or what replaces it; None without asynchronous scheduling."""
        valid_sampled_token_count_event: torch.Event | None
        """None without asynchronous scheduling or drafts."""
        _draft_token_ids: torch.Tensor | list[list[int]] | None
        """(rows of the last step, drafts) int64, device, if the drafter runs on the device."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def _update_states(self, scheduler_output: SchedulerOutput) -> object: ...
        def _get_valid_sampled_token_count(self) -> list[int]: ...
        def _copy_valid_sampled_token_count(
            self, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
        ) -> None: ...
        def _calc_spec_decode_metadata(
            self, num_draft_tokens: npt.NDArray[np.int32], cu_num_scheduled_tokens: npt.NDArray[np.int32]
        ) -> SpecDecodeMetadata: ...
        def _prepare_input_ids(
            self,
            scheduler_output: SchedulerOutput,
            total_num_scheduled_tokens: int,
            cu_num_tokens: npt.NDArray[np.int32],
        ) -> None: ...
        def _prepare_inputs(
            self, scheduler_output: SchedulerOutput, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, SpecDecodeMetadata | None]: ...
        def _dummy_sampler_run(self, *args: object, **kwargs: object) -> torch.Tensor: ...
        def _gather_mm_embeddings(self, *args: object, **kwargs: object) -> object: ...
        def _build_attention_metadata(self, *args: object, **kwargs: object) -> tuple[object, BatchMetadata | None]: ...

    class BuilderBase:
        """`AttentionMetadataBuilder`: one backend's metadata of a batch."""

        device: torch.device
        kv_cache_spec: AttentionSpec

        def __init__(self, *args: object, **kwargs: object) -> None: ...
        @classmethod
        def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> object:
            """The batches that CUDA graphs support: an `AttentionCGSupport`."""

        def build(
            self, common_prefix_len: int, common_attn_metadata: BatchMetadata, fast_build: bool = False
        ) -> object:
            """The metadata for the backend's layers."""

else:
    RunnerBase = BuilderBase = object
