"""FlashInfer's planned wrappers over a paged KV cache, planned from an upper bound and exact on the device.

A plan shares out work on the host, for which a bound serves; the lengths that the kernels mask by are device memory.
So the host plans from `seq_lens_cpu_upper_bound`, and `carry_lengths` then writes `seq_lens` over it in stream order.
Three things were safe only because the host used to wait before it planned:

- FlashAttention 2 split over keys: with several query tokens a request, the kernel counts a request's chunks by the
  exact length, and the plan's merge by the bound. `carry_lengths` counts the plan's again.
- FlashAttention 3 (SM90) copies lengths into each piece of work when it plans: `carry_lengths` writes those.
- A plan fills a pinned buffer and copies it asynchronously; the next plan must not fill it before that copy has run.
  `PlanBuffers` hands out another one, fenced by an event.

Sources: flashinfer-python 0.6.14 and 0.7.0, `include/flashinfer/attention/{scheduler,prefill}.cuh`, `page.cuh`,
`hopper/tile_scheduler.cuh`, `decode.py` and `prefill.py`. FlashInfer is not imported here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_async_spec.host_copy import PinnedRing
from vllm_async_spec.kernels import set_chunks, set_last_page_lens, set_work_lens

_INT32_BYTES = 4
_INT32_MAX = torch.iinfo(torch.int32).max
_MOST_ROWS = 128
"""Of a piece of work of FlashAttention 2: query tokens by the heads of a group."""
# PrefillPlanInfo::ToVector: two sizes, offsets in bytes into the int workspace, and two flags.
_PLAN_SIZE = 15
_WORKS, _QUERY_TOKENS, _TILE, _REQUESTS, _CHUNKS = 0, 1, 3, 4, 6
_MERGE_INDPTR, _OUTPUT_INDPTR, _CHUNK_SIZE, _SPLIT = 7, 8, 9, 14
# PrefillPlanSM90Info::ToVector: offsets in bytes into the int workspace, and one flag.
_SM90_PLAN_SIZE = 9
_SM90_QO_TILES, _SM90_QO_INDPTR, _SM90_KV_LENS, _SM90_WORK_INDPTR, _SM90_REQUESTS = 0, 1, 4, 6, 7


class PlanError(RuntimeError):
    """A wrapper holds its plan in a way that is not known; the message names it."""


def carry_lengths(wrapper: Any, seq_lens: torch.Tensor, page_size: int) -> None:
    """Write the exact lengths over those that `wrapper` was planned with. Launches kernels and waits for nothing.

    Args:
        wrapper: a `BatchDecodeWithPagedKVCacheWrapper` or `BatchPrefillWithPagedKVCacheWrapper` of flashinfer-python,
            just planned, with page indices spaced as the bound's; its backend is `fa2` or `fa3`.
        seq_lens: (batch,) int32, device: exact lengths of the requests planned, none above its bound.
        page_size: tokens in a page.

    Raises:
        PlanError: the wrapper's backend, or its plan, is of another kind.
    """
    if wrapper._backend == "fa2":
        batch = min(seq_lens.shape[0], wrapper._paged_kv_last_page_len_buf.shape[0])
        set_last_page_lens(
            seq_lens[:batch],
            wrapper._paged_kv_indptr_buf[: batch + 1],
            page_size,
            wrapper._paged_kv_last_page_len_buf[:batch],
        )
        # With one query token a request, a chunk too many is empty, and harmless.
        if getattr(wrapper, "_max_q_len", 1) > 1:
            _carry_chunks(wrapper, seq_lens[:batch])
    elif wrapper._backend == "fa3" and len(wrapper._plan_info) == _SM90_PLAN_SIZE:
        plan = [int(offset) for offset in wrapper._plan_info]
        works = (plan[_SM90_QO_INDPTR] - plan[_SM90_QO_TILES]) // _INT32_BYTES
        ints = wrapper._int_workspace_buffer.view(torch.int32)
        # Cumulative by processor, so the last entry counts all; what is behind it in the other two is padding.
        count = _at(ints, plan[_SM90_WORK_INDPTR], 1 + _processors(ints.device))[-1:]
        set_work_lens(seq_lens, _at(ints, plan[_SM90_REQUESTS], works), count, _at(ints, plan[_SM90_KV_LENS], works))
    else:
        raise PlanError(
            f"a plan of {type(wrapper).__name__} with backend {wrapper._backend!r} can't be corrected on the device"
        )


def split_bytes(
    requests: int, tokens: int, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device
) -> int:
    """What FlashAttention 2 may need of a wrapper's float workspace to plan for a graph; with less its plan may fail.

    A graph always splits keys, into as many pieces of work as any later plan may need, and each piece has room for
    the outputs of its rows and for their sums, in float32. FlashAttention 3 needs none.

    Args:
        requests: of the graph.
        tokens: query tokens of each.
        num_heads: query heads.
        num_kv_heads: of the KV cache.
        head_size: of keys and values.
        device: the wrapper's.

    Returns:
        Bytes; no fewer than it takes, since no piece has more rows than is counted here.
    """
    rows = requests * tokens * num_heads // num_kv_heads
    pieces = max(2 * _processors(device) // num_kv_heads, -(-rows // _MOST_ROWS) + requests - 1)
    return 4 * num_heads * pieces * _MOST_ROWS * (head_size + 1)


def _carry_chunks(wrapper: Any, seq_lens: torch.Tensor) -> None:
    plan = [int(number) for number in wrapper._plan_info]
    if len(plan) != _PLAN_SIZE:
        raise PlanError(f"a plan of {type(wrapper).__name__} of {len(plan)} numbers can't be corrected on the device")
    if not plan[_SPLIT]:
        return
    ints, window = wrapper._int_workspace_buffer.view(torch.int32), wrapper._window_left
    set_chunks(
        seq_lens,
        wrapper._qo_indptr_buf,
        _INT32_MAX if window < 0 else window + plan[_TILE],
        _at(ints, plan[_CHUNK_SIZE], 1),
        _at(ints, plan[_REQUESTS], plan[_WORKS]),
        _at(ints, plan[_CHUNKS], plan[_WORKS]),
        _at(ints, plan[_OUTPUT_INDPTR], seq_lens.shape[0] + 1),
        _at(ints, plan[_MERGE_INDPTR], plan[_QUERY_TOKENS] + 1),
    )


def _at(ints: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    return ints[offset // _INT32_BYTES :][:count]


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class PlanBuffers:
    """Pinned buffers that wrappers' plans are filled into in turn, each fenced by the copy that empties it.

    Args:
        depth: plans that may be in flight before one waits, counted.
        nbytes: size of each, at least that of the wrappers' own.
        device: the wrappers' device.
    """

    def __init__(self, depth: int, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._ring = PinnedRing((nbytes,), torch.uint8, depth=depth, device=device)
        self._lent = False

    def lend(self, wrapper: Any) -> None:
        """Let the next plan of `wrapper` fill the buffer whose turn it is.

        Raises:
            PlanError: the wrapper may plan more than a buffer holds.
        """
        own = wrapper._pin_memory_int_workspace_buffer.nbytes
        if own > self._nbytes:
            raise PlanError(f"{type(wrapper).__name__} plans in {own} bytes, and the buffers have {self._nbytes}")
        self.planned()
        wrapper._pin_memory_int_workspace_buffer = self._ring.next()
        self._lent = True

    def planned(self) -> None:
        """Say that what was lent has been planned with, so that its copy is on the stream."""
        if self._lent:
            self._ring.fence()
            self._lent = False
