"""CUDA graphs of drafts that FlashInfer's wrappers verify: on GPUs without XQA or trtllm-gen, and on Hopper.

vLLM captures full graphs of such batches only for kernels without a plan. The wrappers support graphs too: with
`use_cuda_graph` a plan keeps the sizes that it was captured with, and its contents are device memory.

Planning takes the host some hundred microseconds, more than the rest of a step's metadata. So each plan is made for
longer requests than there are, and reused until a request outgrows it. In each step, kernels write lengths and pages
into the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_async_spec.attention.flashinfer import keep_plan, planned_requests, split_bytes, with_empty_requests

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream import BatchMetadata
    from vllm_async_spec.vllm_plugin.upstream_config import VllmConfig
    from vllm_async_spec.vllm_plugin.upstream_flashinfer import (
        FlashInferBuilderBase,
        FlashInferMetadata,
        PlannedWrapper,
    )

MOST_ROWS = 64
"""Most rows of a request (query tokens times GQA group size) for FlashAttention 2 to replace XQA. Beyond 64 rows its
tiles have 128 rows anyway. Times in a layer on an H200, FlashAttention 2 against XQA. Up to 16 rows it wins every
batch: one short request takes 15 µs against 29, 32 requests of 16,384 keys 497 against 605. With more rows XQA wins
large batches. 32 requests take 26 µs against 25 with 264 keys, 99 against 97 with 4,096, 363 against 317 with 16,384.
XQA takes some 15 µs more in a layer than alone, probably because its code left the caches; FlashAttention 2 takes 3."""


AHEAD = 128
"""Tokens beyond each request's bound that a plan allows for: 32 steps with three drafts, all accepted. A tile whose KV
chunk does not exist yet computes its request's last chunk a second time, with the same result."""


def drafts_in_graphs(config: VllmConfig) -> bool:
    """Whether the configuration allows CUDA graphs of drafts; vLLM's `cudagraph_mode` decides which are captured.

    Args:
        config: vLLM's configuration, with its attention layers registered.
    """
    sinks = (getattr(layer, "impl", None) for layer in config.compilation_config.static_forward_context.values())
    return bool(
        config.speculative_config is not None
        and config.parallel_config.decode_context_parallel_size == 1
        and not getattr(config.attention_config, "use_non_causal", False)
        and not config.cache_config.cache_dtype.startswith("nvfp4")
        # Attention sinks have a wrapper of their own.
        and all(getattr(impl, "sinks", None) is None for impl in sinks)
    )


def as_many_of_each(metadata: BatchMetadata) -> bool:
    """Whether all requests have the same number of query tokens.

    Requests without query tokens at the end are padding, up to the size of the graph.
    """
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    live = np.count_nonzero(query_lens)
    return bool((query_lens[:live] == metadata.max_query_len).all())


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """The last plan, and the batch it was made for."""

    size: tuple[int, int]
    live_tokens: int
    bound: npt.NDArray[np.int32]
    built: FlashInferMetadata


class GraphWrappers:
    """One wrapper for each size of a batch of drafts. All share their buffers, so only the last plan is valid.

    Args:
        builder: vLLM's metadata builder. Graphs read its page indices.
        backend: FlashInfer's name of the backend; with `auto` FlashInfer chooses.
        flash_attention_2: whether the backend, given or chosen, is FlashAttention 2.
    """

    def __init__(self, builder: FlashInferBuilderBase, backend: str, flash_attention_2: bool) -> None:
        self._builder, self._flash_attention_2 = builder, flash_attention_2
        # By name: a wrapper that is to choose does so in its first plan, which the graph is captured with.
        self._backend = "fa2" if flash_attention_2 else backend
        self._workspace: torch.Tensor | None = None
        self._by_size: dict[tuple[int, int], PlannedWrapper] = {}
        self._plan: _Plan | None = None
        self._most_tokens: int = builder._decode_cudagraph_max_bs
        # A plan never has more requests than tokens.
        self._buffers = torch.zeros(3, self._most_tokens + 1, dtype=torch.int32, device=builder.device)
        self._most_drafts: int = builder.vllm_config.speculative_config.num_speculative_tokens

    def takes(self, metadata: BatchMetadata) -> bool:
        """Whether every request has the same number of drafts, and some graph is large enough for the batch.

        Args:
            metadata: vLLM's common metadata, padded as the graph is.
        """
        tokens, requests = int(metadata.max_query_len), metadata.num_reqs
        return bool(
            1 < tokens <= 1 + self._most_drafts
            and tokens * requests <= self._most_tokens
            and metadata.causal
            and as_many_of_each(metadata)
        )

    def of(self, metadata: BatchMetadata, make: Callable[[], PlannedWrapper]) -> PlannedWrapper:
        """The wrapper for a batch that `takes` accepts.

        Args:
            metadata: as in `takes`.
            make: makes vLLM's prefill wrapper, whose class, layout and workspace this wrapper shares.
        """
        self._plan, size = None, _size(metadata)
        if size not in self._by_size:
            self._by_size[size] = self._make(*size, make())
        return self._by_size[size]

    def ahead(self, metadata: BatchMetadata, bound_cpu: torch.Tensor) -> torch.Tensor:
        """(requests,) int32, host: the lengths to plan for, so that later steps can reuse the plan.

        Args:
            metadata: as in `takes`.
            bound_cpu: (requests,) int32, host: upper bounds of its lengths; 0 for padding.
        """
        most = metadata.block_table_tensor.shape[1] * self._builder.page_size
        return torch.where(bound_cpu > 0, (bound_cpu + AHEAD).clamp(max=most), bound_cpu)

    def keep(self, metadata: BatchMetadata, bound_cpu: torch.Tensor, built: FlashInferMetadata) -> None:
        """Keep the newest plan, so that later batches can reuse it.

        Args:
            metadata: as in `takes`.
            bound_cpu: (requests,) int32, host: the lengths that `ahead` returned.
            built: vLLM's metadata, with a wrapper from `of`.
        """
        keep_plan(built.prefill.wrapper, metadata.num_reqs)
        self._plan = _Plan(_size(metadata), _live_tokens(metadata), bound_cpu.numpy(), built)

    def again(self, metadata: BatchMetadata, bound_cpu: torch.Tensor) -> FlashInferMetadata | None:
        """The last plan as this batch's metadata, before correction; None where the batch needs a new plan.

        Args:
            metadata: as in `takes`.
            bound_cpu: as in `ahead`.
        """
        plan = self._plan
        if plan is None or plan.size != _size(metadata) or plan.live_tokens != _live_tokens(metadata):
            return None
        # A plan for much longer requests is correct, but wastes tiles.
        left = plan.bound - bound_cpu.numpy()
        if left.min() < 0 or left.max() > 2 * AHEAD:
            return None
        tokens = metadata.num_actual_tokens
        return dataclasses.replace(
            plan.built, slot_mapping=metadata.slot_mapping, num_actual_tokens=tokens, num_prefill_tokens=tokens
        )

    def _make(self, requests: int, tokens: int, like: PlannedWrapper) -> Any:
        builder, workspace = self._builder, like._float_workspace_buffer
        indices = getattr(builder.paged_kv_indices, "gpu", builder.paged_kv_indices)
        planned, needed = requests, self._needed(requests, requests, tokens)
        if self._flash_attention_2:
            more = planned_requests(requests, tokens, builder.num_qo_heads // builder.num_kv_heads)
            # Smaller tiles are more numerous, and may need more memory in all.
            room = self._needed(more, requests, tokens)
            if room <= max(needed, workspace.nbytes):
                planned, needed = more, room
        query_indptr, page_indptr, last_page_lens = self._buffers
        upstream: Any = type(like)
        wrapper = with_empty_requests(upstream)(
            self._roomy(needed, workspace),
            like._kv_layout,
            use_cuda_graph=True,
            qo_indptr_buf=query_indptr[: planned + 1],
            paged_kv_indptr_buf=page_indptr[: planned + 1],
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_lens[:planned],
            backend=self._backend,
        )
        # One workspace of 8 MiB serves all wrappers, because graphs read only the last plan.
        wrapper._int_workspace_buffer = next(
            (known._int_workspace_buffer for known in self._by_size.values()), wrapper._int_workspace_buffer
        )
        return wrapper

    def _needed(self, planned: int, requests: int, tokens: int) -> int:
        builder = self._builder
        heads = builder.num_qo_heads, builder.num_kv_heads
        return split_bytes(planned, requests, tokens, *heads, builder.head_dim, builder.device)

    def _roomy(self, needed: int, given: torch.Tensor) -> torch.Tensor:
        """The workspace of vLLM, or our own for sizes that may need more; vLLM captures the largest sizes first."""
        if needed <= given.nbytes:
            return given
        if self._workspace is None or self._workspace.nbytes < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self._builder.device)
        return self._workspace


def _size(metadata: BatchMetadata) -> tuple[int, int]:
    """The number of requests, and the query tokens of each."""
    return metadata.num_reqs, int(metadata.max_query_len)


def _live_tokens(metadata: BatchMetadata) -> int:
    return int(metadata.query_start_loc_cpu[-1])
