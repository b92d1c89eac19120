"""Drafts inside CUDA graphs where FlashInfer's wrappers verify them, as on every GPU without XQA or trtllm-gen, and on
Hopper.

vLLM captures full graphs of such batches only for kernels that it does not plan. The wrappers could always do it: with
`use_cuda_graph` a plan keeps to the sizes that it was captured with, and its contents are device memory.

To plan takes the host some hundred microseconds, more than all else of a step's metadata. So a plan is made for
somewhat longer requests than there are, and serves until one is longer still: kernels write lengths and pages into it
in each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_async_spec.attention.flashinfer import keep_plan, planned_requests, split_bytes, with_empty_requests

MOST_ROWS = 64
"""Of a request, query tokens by the heads of a group, for its drafts not to be XQA's, which takes them too. XQA takes
an H200 some 15 µs more in a layer than alone, probably for code that has left the caches; FlashAttention 2 takes 3. In
a layer that one is faster for every batch with up to 16 rows a request: 15 µs and 29 for one short request, 497 and 605
for 32 with 16,384 keys each. With more rows it is for all but the largest: 26 µs and 25 for 32 requests with 264 keys,
99 and 97 with 4,096, 363 and 317 with 16,384. Beyond 64 rows its pieces of work are the widest either way."""


AHEAD = 128
"""Tokens that a plan is made for beyond the bound of each request: 32 steps with three drafts, all accepted. A piece of
work that then finds no keys of its own attends to its request's last ones again, beside the others."""


def drafts_in_graphs(config: Any) -> bool:
    """Whether batches of drafts may be captured, as far as the configuration decides; vLLM decides whether they are.

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


def as_many_of_each(metadata: Any) -> bool:
    """Whether all requests have the same number of query tokens.

    Requests without query tokens at the end are what pads a batch to the size of its graph.
    """
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    live = np.count_nonzero(query_lens)
    return bool((query_lens[:live] == metadata.max_query_len).all())


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What was planned last."""

    size: tuple[int, int]
    live_tokens: int
    bound: np.ndarray[Any, np.dtype[np.int32]]
    built: Any


class GraphWrappers:
    """One wrapper for each size of a batch of drafts; all share their buffers, of which one plan is in use.

    Args:
        builder: vLLM's metadata builder; its page indices are what graphs read.
        backend: FlashInfer's; `auto` leaves the choice to it.
        flash_attention_2: whether that is its choice then, or it is given.
    """

    def __init__(self, builder: Any, backend: str, flash_attention_2: bool) -> None:
        self._builder, self._backend, self._flash_attention_2 = builder, backend, flash_attention_2
        self._workspace: torch.Tensor | None = None
        self._by_size: dict[tuple[int, int], Any] = {}
        self._plan: _Plan | None = None
        self._most_tokens: int = builder._decode_cudagraph_max_bs
        # More requests than tokens are never planned.
        self._buffers = torch.zeros(3, self._most_tokens + 1, dtype=torch.int32, device=builder.device)
        self._most_drafts: int = builder.vllm_config.speculative_config.num_speculative_tokens

    def takes(self, metadata: Any) -> bool:
        """Whether this is a batch of drafts, and no larger than any graph.

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

    def of(self, metadata: Any, make: Callable[[], Any]) -> Any:
        """The wrapper for a batch that `takes` says yes to.

        Args:
            metadata: as there.
            make: makes vLLM's own wrapper for prefills, whose kind, layout and workspace this one has too.
        """
        self._plan, size = None, _size(metadata)
        if size not in self._by_size:
            self._by_size[size] = self._make(*size, make())
        return self._by_size[size]

    def ahead(self, metadata: Any, bound: torch.Tensor) -> torch.Tensor:
        """What to plan for, so that the plan serves for some steps.

        Args:
            metadata: as in `takes`.
            bound: (requests,) int32, host: of its lengths; 0 for what pads the batch.
        """
        most = metadata.block_table_tensor.shape[1] * self._builder.page_size
        return torch.where(bound > 0, (bound + AHEAD).clamp(max=most), bound)

    def keep(self, metadata: Any, bound: torch.Tensor, built: Any) -> None:
        """Let the plan that was just made serve later batches.

        Args:
            metadata: as in `takes`.
            bound: by `ahead`.
            built: vLLM's metadata, with a wrapper of `of`.
        """
        keep_plan(built.prefill.wrapper, metadata.num_reqs)
        self._plan = _Plan(_size(metadata), _live_tokens(metadata), bound.numpy(), built)

    def again(self, metadata: Any, bound: torch.Tensor) -> Any:
        """The last plan as this batch's metadata, to be corrected for its lengths; None where it doesn't serve.

        Args:
            metadata: as in `takes`.
            bound: as in `ahead`.
        """
        plan = self._plan
        if plan is None or plan.size != _size(metadata) or plan.live_tokens != _live_tokens(metadata):
            return None
        # A plan for much longer requests is correct, and shares out work that is not there.
        left = plan.bound - bound.numpy()
        if left.min() < 0 or left.max() > 2 * AHEAD:
            return None
        tokens = metadata.num_actual_tokens
        return dataclasses.replace(
            plan.built, slot_mapping=metadata.slot_mapping, num_actual_tokens=tokens, num_prefill_tokens=tokens
        )

    def _make(self, requests: int, tokens: int, like: Any) -> Any:
        builder, workspace = self._builder, like._float_workspace_buffer
        indices = getattr(builder.paged_kv_indices, "gpu", builder.paged_kv_indices)
        planned, needed = requests, self._needed(requests, requests * tokens)
        if self._flash_attention_2:
            more = planned_requests(requests, tokens, builder.num_qo_heads // builder.num_kv_heads)
            # Smaller pieces of work are more, and may need more room in all.
            room = self._needed(more, requests * tokens)
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
        # 8 MiB each, of which only the last plan's is read.
        wrapper._int_workspace_buffer = next(
            (known._int_workspace_buffer for known in self._by_size.values()), wrapper._int_workspace_buffer
        )
        return wrapper

    def _needed(self, planned: int, tokens: int) -> int:
        builder = self._builder
        return split_bytes(
            planned, tokens, builder.num_qo_heads, builder.num_kv_heads, builder.head_dim, builder.device
        )

    def _roomy(self, needed: int, given: torch.Tensor) -> torch.Tensor:
        """The workspace of vLLM, or one of our own for sizes that may need more; the largest are captured first."""
        if needed <= given.nbytes:
            return given
        if self._workspace is None or self._workspace.nbytes < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self._builder.device)
        return self._workspace


def _size(metadata: Any) -> tuple[int, int]:
    """Requests, and query tokens of each."""
    return metadata.num_reqs, int(metadata.max_query_len)


def _live_tokens(metadata: Any) -> int:
    return int(metadata.query_start_loc_cpu[-1])
