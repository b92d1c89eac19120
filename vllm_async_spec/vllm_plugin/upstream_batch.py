"""Types of vLLM's batches and engine arguments, for readers and for the type checker.

As in `upstream`: a Protocol lists only the members that patches read or call. Each member exists, with this type, in
all releases of the patches that use the member. Members of only some releases are read with `getattr`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_async_spec.vllm_plugin.upstream import (
    BatchMetadata,
    CachedRequestData,
    CachedRequestState,
    CpuGpuBuffer,
    InputBatch,
    SchedulerOutput,
    SpecDecodeMetadata,
)
from vllm_async_spec.vllm_plugin.upstream_config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)


class EngineArgs(Protocol):
    """What the user asked of an engine: `EngineArgs`, or `AsyncEngineArgs` for a server."""

    async_scheduling: bool | None
    """None if the user did not choose; in 0.12 and 0.13 only with the patch `async-scheduling-unset`."""
    speculative_config: dict[str, object] | None
    """As given by the user. vLLM adds entries while it makes the configuration."""
    pipeline_parallel_size: int

    def create_engine_config(self, usage_context: object = None) -> VllmConfig:
        """The configuration, validated; `usage_context` is vLLM's `UsageContext`, whose default batches differ."""


class CommonMetadata(BatchMetadata, Protocol):
    """More of `CommonAttentionMetadata`."""

    logits_indices_padded: torch.Tensor | None
    """(tokens,) int32, device: the tokens that fast prefill runs on, padded; None without it."""
    num_logits_indices: int | None
    """How many of them are not padding; None without fast prefill."""
    is_prefilling: torch.Tensor | None
    """(requests,) bool, host; from 0.20 on."""


class GraftedMetadata(BatchMetadata, Protocol):
    """`CommonAttentionMetadata` with the views of `VllmHostLengths`, which the patches of `metadata` add."""

    _seq_lens_cpu: torch.Tensor | None
    """(requests,) int32, host; None if unknown."""
    _num_computed_tokens_cpu: torch.Tensor | None
    """(requests,) int32, host; None if unknown."""

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> GraftedMetadata:
        """The metadata of the first requests, without the padding for CUDA graphs."""

    def seq_lens_changed(self) -> None:
        """Drop the host values."""


class MLABuilder(Protocol):
    """`MLACommonMetadataBuilder` or `SparseMLACommonMetadataBuilder`, from 0.20 on."""

    vllm_config: VllmConfig


class DraftingBuilder(Protocol):
    """`AttentionMetadataBuilder`, as the drafter of 0.12 and 0.13 uses it."""

    def build_for_drafting(self, common_attn_metadata: GraftedMetadata, draft_index: int) -> object:
        """The metadata for the draft model's layers, from 0 for the first draft step."""


class EagleProposer(Protocol):
    """The drafter of 0.12 and 0.13."""

    num_speculative_tokens: int
    attn_metadata_builder: DraftingBuilder | None
    """None until the first step."""

    def _get_attention_metadata_builder(self) -> DraftingBuilder: ...


class FastPrefillRunner(Protocol):
    """`GPUModelRunner` of the V1 runner, as fast prefill uses it."""

    input_batch: InputBatch
    query_start_loc: CpuGpuBuffer
    """(requests + 1,) int32."""


class CopyEvent(Protocol):
    """`torch.Event`: the end of a copy."""

    def synchronize(self) -> None:
        """Wait for it."""


class SampledBatch(InputBatch, Protocol):
    """The V1 runner's persistent batch, with what sampling needs."""

    vocab_size: int
    top_k_cpu: npt.NDArray[np.int32]
    """(rows,), host; `vocab_size` without top-k."""
    async_copy_ready_event: CopyEvent | None
    """The end of the copy to `sampled_token_ids_cpu`; None if there is none."""
    sampled_token_ids_cpu: torch.Tensor
    """(rows of the last step, 1 or more) int32, host; only where there is an event."""
    frequency_penalties_reqs: set[str]
    """The requests with this penalty, as in the next two."""
    presence_penalties_reqs: set[str]
    repetition_penalties_reqs: set[str]
    req_output_token_ids: list[list[int]]
    """By row."""
    logitsprocs_need_output_token_ids: bool
    """Whether there are custom logits processors."""

    @property
    def no_top_k(self) -> bool:
        """Whether no request samples with top-k."""


AddRequest = Callable[[object, list[int] | None, Sequence[int]], object]
"""From a request's sampling parameters, prompt and output to a processor's state for it; None for none."""


class MinTokensProcessor(Protocol):
    """`MinTokensLogitsProcessor`."""

    add_request: AddRequest
    """A static method."""
    min_toks: Mapping[int, object]
    """By row, what it counts of requests that have yet to reach their minimum."""

    def update_state(self, batch_update: None) -> None:
        """Forget the requests that have reached their minimum; the batch is as it was."""


class CarryingRunner(Protocol):
    """`GPUModelRunner` of the V1 runner from 0.19 on, which carries counts and positions on the device."""

    device: torch.device
    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    lora_config: object
    """None without adapters."""
    use_async_spec_decode: bool
    uses_mrope: bool
    uses_xdrope_dim: int
    supports_mm_inputs: bool
    enable_prompt_embeds: bool
    dcp_world_size: int
    input_batch: InputBatch
    requests: Mapping[str, CachedRequestState]
    prev_positions: CpuGpuBuffer
    """(requests,) int64: the row that each request had in the last step."""
    prev_num_draft_tokens: CpuGpuBuffer
    """(requests,) int32: drafts that each row of the last step verified."""
    num_decode_draft_tokens: CpuGpuBuffer
    """(requests,) int32: drafts of each row that only decodes; -1 for others."""
    optimistic_seq_lens_cpu: torch.Tensor
    """(requests,) int32, host: lengths as if all drafts had been accepted."""
    num_computed_tokens: torch.Tensor
    """(requests,) int32, device."""
    num_accepted_tokens: CpuGpuBuffer
    """(requests,) int32."""
    discard_request_mask: CpuGpuBuffer
    """(requests,) bool: rows whose prompts go on after this step."""
    query_start_loc: CpuGpuBuffer
    """(requests + 1,) int32."""
    seq_lens: torch.Tensor
    """(requests,) int32, device."""
    positions: torch.Tensor
    """(tokens,) int64, device."""
    input_ids: CpuGpuBuffer
    """(tokens,) int32."""
    valid_sampled_token_count_gpu: torch.Tensor | None
    """(rows of the last step,) int32, device: the tokens that it accepted of each."""
    _draft_token_ids: torch.Tensor | list[list[int]] | None
    """(rows of the last step, drafts), device, if the drafter runs on the device."""

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: npt.NDArray[np.int32], cu_num_scheduled_tokens: npt.NDArray[np.int32]
    ) -> SpecDecodeMetadata:
        """The metadata of drafts, from the drafts of each row and the tokens up to its end."""


class RequestAccount(CachedRequestState, Protocol):
    """More of the runner's state of a request."""

    num_computed_tokens: int
    block_ids: Sequence[list[int]]
    """By KV cache group."""


class AccountedRequests(CachedRequestData, Protocol):
    """More of the requests of a step that the runner already knows."""

    resumed_req_ids: set[str]
    """Those that were preempted before."""
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    """By KV cache group; None without new blocks."""


class AccountedStep(SchedulerOutput, Protocol):
    """More of the requests and tokens that a step computes."""

    scheduled_cached_reqs: AccountedRequests
    scheduled_new_reqs: Sequence[object]
    finished_req_ids: set[str]


class AccountBatch(InputBatch, Protocol):
    """The V1 runner's persistent batch, with its account of tokens; all on the host."""

    token_ids_cpu: npt.NDArray[np.int32]
    """(rows, longest sequence)."""
    is_token_ids: npt.NDArray[np.bool_]
    """(rows, longest sequence): False where a token is given as an embedding."""
    spec_token_ids: list[list[int]]
    """Drafts by row."""

    def condense(self) -> None:
        """Move the last rows into those that were left."""

    def refresh_metadata(self) -> None:
        """Make the sampler's metadata anew, if the requests have changed."""


class AccountingRunner(Protocol):
    """`GPUModelRunner` of the V1 runner from 0.21 on, as it takes over what the scheduler says."""

    parallel_config: ParallelConfig
    speculative_config: SpeculativeConfig | None
    use_async_spec_decode: bool
    requests: Mapping[str, RequestAccount]
    input_batch: AccountBatch
    prev_num_draft_tokens: CpuGpuBuffer
    """(requests,) int32: drafts that each row of the last step verified."""

    def _get_valid_sampled_token_count(self) -> list[int]:
        """Tokens that the last step accepted of each of its rows, once the host has them; empty if there are none."""

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Let the attention backend move rows."""


class DispatchingRunner(Protocol):
    """`GPUModelRunner` of the V1 runner, as it chooses a step's CUDA graph."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    compilation_config: CompilationConfig
    num_spec_tokens: int
    """Most drafts of a request; 0 without speculative decoding."""


class LinearMetadata(Protocol):
    """`GDNAttentionMetadata`: a step of linear attention."""

    num_prefills: int
    num_decodes: int
    """Requests that decode without drafts."""
    num_spec_decodes: int
    spec_query_start_loc: torch.Tensor | None
    """(requests + 1,) int32, device; as the next two, None without drafts, and longer where CUDA graphs read it."""
    spec_state_indices_tensor: torch.Tensor | None
    """(requests, 1 + drafts) int32, device."""
    num_accepted_tokens: torch.Tensor | None
    """(requests,) int32, device."""


class LinearBuilder(Protocol):
    """`GDNAttentionMetadataBuilder`."""

    vllm_config: VllmConfig
    kv_cache_spec: object
    num_spec: int
    """Drafts of a request."""
    spec_state_indices_tensor: torch.Tensor
    """(requests, 1 + drafts) int32, device: what CUDA graphs read, as the next."""
    num_accepted_tokens: torch.Tensor
    """(requests,) int32, device."""
