"""Types of the vLLM objects that patches use, for readers and for the type checker.

A Protocol lists only the members of vLLM's class that patches read or call. Each member exists, with this type, in all
releases of the patches that use the member. Members of only some releases are read with `getattr`. A `...Base` class
replaces vLLM's class as the base of a patch's class, for type checking only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "BatchMetadata",
    "BuilderBase",
    "CachedRequestData",
    "CpuGpuBuffer",
    "FlashInferBuilderBase",
    "InputBatch",
    "MultiGroupBlockTable",
    "RunnerBase",
    "SchedulerOutput",
    "SpecDecodeMetadata",
]


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


class MultiGroupBlockTable(Protocol):
    """The pages of all KV cache groups."""

    block_tables: Sequence[BlockTable]


class SamplingMetadata(Protocol):
    """The sampler's parameters for a batch."""

    output_token_ids: list[list[int]]
    """Empty unless penalties or a logits processor read them."""


class LogitsProcessors(Protocol):
    """The logits processors of a batch."""

    @property
    def all(self) -> Sequence[Any]:
        """Each of them."""


class InputBatch(Protocol):
    """The V1 runner's persistent batch."""

    req_ids: Sequence[str]
    """By row, for the rows that are in use."""
    req_id_to_index: Mapping[str, int]
    num_reqs: int
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    """(rows,), host."""
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


class CachedRequestData(Protocol):
    """The requests of a step that the runner already knows. All sequences have the same order."""

    req_ids: Sequence[str]
    num_computed_tokens: Sequence[int]
    num_output_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    """The requests and tokens that a step computes."""

    scheduled_cached_reqs: CachedRequestData
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    """Drafts by request; -1 for drafts that only the device knows."""


class SpecDecodeMetadata(Protocol):
    """Which tokens of a step are drafts."""

    draft_token_ids: torch.Tensor
    """(drafts,) int32, device."""


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


if TYPE_CHECKING:  # for the type checker, methods need no bodies

    class RunnerBase:
        """`GPUModelRunner` of the V1 runner, 0.14 to 0.18."""

        device: torch.device
        max_num_reqs: int
        max_num_tokens: int
        num_spec_tokens: int
        parallel_config: Any
        speculative_config: Any
        model_config: Any
        dcp_world_size: int
        enable_prompt_embeds: bool
        is_multimodal_pruning_enabled: bool
        input_batch: InputBatch
        requests: Mapping[str, CachedRequestState]
        attn_groups: Sequence[Sequence[Any]]
        """Empty until there is a KV cache."""
        drafter: Any
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
        prepare_inputs_event: Any
        """None without asynchronous scheduling."""
        valid_sampled_token_count_event: Any
        """None without asynchronous scheduling or drafts."""
        _draft_token_ids: torch.Tensor | list[list[int]] | None
        """(rows of the last step, drafts) int64, device, if the drafter runs on the device."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def _update_states(self, scheduler_output: SchedulerOutput) -> Any: ...
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
            self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, SpecDecodeMetadata | None]: ...
        def _dummy_sampler_run(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
        def _gather_mm_embeddings(self, *args: Any, **kwargs: Any) -> Any: ...
        def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> tuple[Any, BatchMetadata | None]: ...

    class BuilderBase:
        """`AttentionMetadataBuilder`: one backend's metadata of a batch."""

        device: torch.device

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            """The batches that CUDA graphs support: an `AttentionCGSupport`."""

        def build(self, common_prefix_len: int, common_attn_metadata: BatchMetadata, fast_build: bool = False) -> Any:
            """The metadata for the backend's layers."""

    class FlashInferBuilderBase(BuilderBase):
        """`FlashInferMetadataBuilder`, from 0.20 on."""

        vllm_config: Any
        enable_cuda_graph: bool
        page_size: int
        reorder_batch_threshold: int
        """Most query tokens of a request that vLLM treats as a decode."""

        def _get_prefill_wrapper(self, *args: Any, **kwargs: Any) -> Any: ...
        def _get_decode_wrapper(self, *args: Any, **kwargs: Any) -> Any: ...

        # From 0.25 on, with XQA.
        def _compute_decode_query_lens(
            self, qo_indptr: torch.Tensor, qo_indptr_cpu: torch.Tensor, num_decodes: int, num_decode_tokens: int
        ) -> tuple[int, torch.Tensor | None, Any]: ...
        def _get_decode_mask(
            self, q_len_per_req: int, ragged_q_lens: Any, num_decodes: int, causal: bool
        ) -> torch.Tensor | None: ...

else:
    RunnerBase = BuilderBase = FlashInferBuilderBase = object
