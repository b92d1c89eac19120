"""FlashInfer's planned wrappers over a paged KV cache, planned from an upper bound and exact on the device.

A plan distributes work on the host, for which an upper bound is enough. The kernels mask by lengths in device memory.
So the host plans from `seq_lens_cpu_upper_bound`, and `write_exact_lengths` then overwrites the bound with `seq_lens`
in stream order. Three things were safe only because the host used to wait before it planned:

- Split-KV in FlashAttention 2: with several query tokens a request, the kernel counts a request's chunks from the exact
  length, but the plan's merge counts them from the bound. `write_exact_lengths` recounts the merge.
- FlashAttention 3 (SM90) copies lengths into each work item when it plans. `write_exact_lengths` overwrites them.
- A plan fills a pinned buffer and copies it asynchronously. The next plan must not fill the same buffer before that
  copy has run. `PlanBuffers` hands out another buffer, fenced by an event.

Three more things were slow: FlashAttention 2 in a CUDA graph for a batch of drafts (see `planned_requests`), what such
a graph launches and merges for nothing (see `with_empty_requests`), and a replan in each step (see `keep_plan`).

Sources: flashinfer-python 0.6.14, 0.7.0 and 0.7.2, `include/flashinfer/attention/{scheduler,prefill}.cuh`, `page.cuh`,
`hopper/tile_scheduler.cuh`, `decode.py` and `prefill.py`. FlashInfer is not imported here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from vllm_async_spec.host_copy import PinnedRing
from vllm_async_spec.kernels import set_chunks, set_last_page_lens, set_pages, set_work_lens

_INT32_BYTES = 4
_INT32_MAX = torch.iinfo(torch.int32).max
_TILES = (16, 64, 128)
"""Tile sizes of FlashAttention 2, in rows: query tokens times GQA group size. For head sizes of 256 and more, actual
tiles are never larger than these."""
# PrefillPlanInfo::ToVector: two sizes, offsets in bytes into the int workspace, and two flags.
_PLAN_SIZE = 15
_WORKS, _QUERY_TOKENS, _TILE, _REQUESTS, _CHUNKS = 0, 1, 3, 4, 6
_MERGE_INDPTR, _OUTPUT_INDPTR, _CHUNK_SIZE, _SPLIT = 7, 8, 9, 14
# PrefillPlanSM90Info::ToVector: offsets in bytes into the int workspace, and one flag.
_SM90_PLAN_SIZE = 9
_SM90_QO_TILES, _SM90_QO_INDPTR, _SM90_KV_LENS, _SM90_WORK_INDPTR, _SM90_REQUESTS = 0, 1, 4, 6, 7


class PlanError(RuntimeError):
    """A wrapper's plan has an unknown form or size; the message names the wrapper."""


def write_exact_lengths(
    wrapper: Any, seq_lens: torch.Tensor, page_size: int, block_table: torch.Tensor | None = None
) -> None:
    """Overwrite the lengths in the plan of `wrapper` with exact lengths. Launches kernels and waits for nothing.

    Args:
        wrapper: a planned `BatchDecodeWithPagedKVCacheWrapper` or `BatchPrefillWithPagedKVCacheWrapper` of
            flashinfer-python, with page indices spaced for the bound; its backend is `fa2` or `fa3`.
        seq_lens: (batch,) int32, device: exact length of each planned request, none above its bound.
        page_size: tokens in a page.
        block_table: (batch or more, pages) int32, device; needed if requests may have other pages than when planned.
            Keep such a plan with `keep_plan` before the first correction.

    Raises:
        PlanError: the wrapper's backend or plan is not supported.
    """
    if block_table is not None:
        batch = seq_lens.shape[0]
        set_pages(
            seq_lens,
            block_table,
            wrapper._paged_kv_indptr_buf[: batch + 1],
            page_size,
            wrapper._paged_kv_indices_buf,
            wrapper._paged_kv_last_page_len_buf[:batch],
        )
    # From 0.7.2 on a decode wrapper may plan for cuDNN while `_backend` names another backend.
    backend = "cudnn" if getattr(wrapper, "_cudnn_auto", False) else wrapper._backend
    if backend == "fa2":
        batch = min(seq_lens.shape[0], wrapper._paged_kv_last_page_len_buf.shape[0])
        if block_table is None:
            set_last_page_lens(
                seq_lens[:batch],
                wrapper._paged_kv_indptr_buf[: batch + 1],
                page_size,
                wrapper._paged_kv_last_page_len_buf[:batch],
            )
        # With one query token a request, a surplus chunk is empty and harmless.
        if _query_tokens(wrapper) > 1:
            _carry_chunks(wrapper, seq_lens[:batch])
    elif backend == "fa3" and len(wrapper._plan_info) == _SM90_PLAN_SIZE:
        plan = [int(offset) for offset in wrapper._plan_info]
        works = (plan[_SM90_QO_INDPTR] - plan[_SM90_QO_TILES]) // _INT32_BYTES
        ints = wrapper._int_workspace_buffer.view(torch.int32)
        # Cumulative by SM, so the last entry counts all work items; later entries of the other two are padding.
        count = _at(ints, plan[_SM90_WORK_INDPTR], 1 + _processors(ints.device))[-1:]
        set_work_lens(seq_lens, _at(ints, plan[_SM90_REQUESTS], works), count, _at(ints, plan[_SM90_KV_LENS], works))
    else:
        raise PlanError(f"a plan of {type(wrapper).__name__} with backend {backend!r} can't be corrected on the device")


def keep_plan(wrapper: Any, requests: int) -> None:
    """Save the planned chunks, which `write_exact_lengths` reduces, so that the plan serves any lengths in its bound.

    Args:
        wrapper: just planned, of a class from `with_empty_requests`.
        requests: number of requests whose lengths `write_exact_lengths` will get.

    Raises:
        PlanError: the wrapper's plan is not supported.
    """
    given = _chunk_arguments(wrapper, requests) if wrapper._backend == "fa2" else None
    if given is not None:
        wrapper.kept = (*given[:4], given[4].clone(), *given[5:])


def planned_requests(requests: int, tokens: int, group: int) -> int:
    """How many requests to plan a CUDA graph of FlashAttention 2 for; the requests after `requests` are empty.

    Under CUDA graphs FlashInfer sizes every tile as if one request owned nearly all tokens: all but one for each other
    request. The kernel computes every row of a tile. For 32 requests of four tokens with GQA group size 4, a tile has
    128 rows, of which 16 are needed. Empty requests leave fewer tokens to the largest request, so tiles shrink.

    Args:
        requests: requests in the graph.
        tokens: query tokens of each request.
        group: query heads for each KV head.

    Returns:
        The fewest for which no tile is larger than a request needs; `requests` if more would not help.
    """
    tile = _tile(tokens * group)
    most_tokens = tile // group if tile < _TILES[-1] else requests * tokens
    return max(requests, requests * tokens - most_tokens + 1)


@functools.cache
def with_empty_requests(wrapper_class: type[Any]) -> type[Any]:
    """A subclass that always plans for as many requests as its buffers hold.

    Where `keys_are_split` says no, a plan of FlashAttention 2 splits no keys, and launches its requests' work alone.
    FlashInfer's would launch work for every distribution of the tokens, store each result as a partial one, and merge
    it with no other.

    Args:
        wrapper_class: `BatchPrefillWithPagedKVCacheWrapper` of flashinfer-python; the subclass is for CUDA graphs of
            requests that have equally many query tokens. Requests without any may follow them.
    """
    return type("WithEmptyRequests", (PaddedPlans, wrapper_class), {})


_Wrapper: Any = object
"""`BatchPrefillWithPagedKVCacheWrapper`, which is not imported here."""


class PaddedPlans(_Wrapper):  # type: ignore[misc]
    """The subclass's own methods, which pad the plan with empty requests."""

    kept: tuple[Any, ...] | None = None
    """Arguments of `set_chunks` after the lengths, if the plan is kept."""
    _plan_info: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count = self._paged_kv_last_page_len_buf.shape[0]
        # Pageable memory, so that a copy to the device has read it when the call returns.
        sizes = {"qo_indptr": count + 1, "paged_kv_indptr": count + 1, "last_page_len": count, "seq_lens": count}
        self._filled = {name: torch.zeros(size, dtype=torch.int32, device="cpu") for name, size in sizes.items()}
        self._views = {name: filled.numpy() for name, filled in self._filled.items()}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *,
        seq_lens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Plan as the base class does, with empty requests added."""
        self.kept = None
        requests, tokens = len(qo_indptr) - 1, int(np.diff(qo_indptr.numpy()).max())
        heads = kwargs["num_qo_heads"], kwargs["num_kv_heads"]
        if self._backend == "fa2":
            # FlashInfer only takes their maximum, in a Python loop, so give the longest alone.
            self._views["seq_lens"][0] = np.diff(paged_kv_indptr.numpy()).max() * kwargs["page_size"]
            kwargs["seq_lens"] = self._filled["seq_lens"][:1]
            kwargs["max_token_per_sequence"] = tokens
        elif seq_lens is not None:
            kwargs["seq_lens"] = self._fill("seq_lens", seq_lens)
        even = self._even_starts(requests, tokens, *heads)
        if even is not None:
            kwargs["disable_split_kv"] = True
        super().plan(
            qo_indptr=self._fill("qo_indptr", qo_indptr if even is None else even, cumulative=True),
            paged_kv_indptr=self._fill("paged_kv_indptr", paged_kv_indptr, cumulative=True),
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=self._fill("last_page_len", paged_kv_last_page_len),
            **kwargs,
        )
        if even is not None:
            self._plan_info = _launching(requests, tokens * heads[0] // heads[1], self._plan_info)
            self._qo_indptr_buf.copy_(self._fill("qo_indptr", qo_indptr, cumulative=True))

    def _even_starts(self, requests: int, tokens: int, num_heads: int, num_kv_heads: int) -> torch.Tensor | None:
        """Query starts to plan with if keys stay whole; else None.

        Such a plan can't mark unused work. So padding is planned like a request, but has no query tokens to write.
        """
        device = self._paged_kv_last_page_len_buf.device
        if self._backend != "fa2" or keys_are_split(requests, tokens, num_heads, num_kv_heads, device):
            return None
        return torch.arange(requests + 1, dtype=torch.int32, device="cpu") * tokens

    def _fill(self, name: str, given_cpu: torch.Tensor, *, cumulative: bool = False) -> torch.Tensor:
        filled, given = self._views[name], given_cpu.numpy()
        filled[: len(given)] = given
        filled[len(given) :] = given[-1] if cumulative else 0
        return self._filled[name]


def _launching(requests: int, rows: int, plan_info: Any) -> Any:
    """The plan with work for the tiles of so many requests of so many rows each, and for no others."""
    plan = [int(number) for number in plan_info]
    plan[_WORKS] = requests * -(-rows // plan[_TILE])
    return type(plan_info)(plan)


def keys_are_split(requests: int, tokens: int, num_heads: int, num_kv_heads: int, device: torch.device) -> bool:
    """Whether a plan for a CUDA graph may split the keys of a request.

    FlashInfer splits keys until each processor has two pieces of work. If requests are enough for that, it splits none.

    Args:
        requests: requests in the graph.
        tokens: query tokens of each request.
        num_heads: query heads.
        num_kv_heads: KV heads.
        device: the wrapper's device.
    """
    rows = tokens * num_heads // num_kv_heads
    return requests * -(-rows // _tile(rows)) < _splits(num_kv_heads, device)


def split_bytes(
    planned: int, requests: int, tokens: int, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device
) -> int:
    """Float workspace that FlashAttention 2 may need to plan for a CUDA graph; with less its plan may fail.

    FlashInfer's graphs always use split-KV, with as many work items as any later plan may need. Each work item stores
    the outputs of its rows and their sums, in float32. From 0.7.2 on a plan needs the bound divided by the GQA group
    size. FlashAttention 3 needs none.

    Args:
        planned: requests that the graph is planned for.
        requests: requests in the graph.
        tokens: query tokens of each request.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: of keys and values.
        device: the wrapper's device.

    Returns:
        An upper bound, in bytes; 0 where `keys_are_split` says no.
    """
    if not keys_are_split(requests, tokens, num_heads, num_kv_heads, device):
        return 0
    group, total = num_heads // num_kv_heads, requests * tokens
    tile = max(_tile((total - planned + 1) * group), _least_tile(device))
    pieces = max(_splits(num_kv_heads, device), -(-total * group // tile) + planned - 1)
    return _output_bytes(pieces * tile, num_heads, head_size)


def split_bytes_outside_graphs(num_heads: int, num_kv_heads: int, head_size: int, device: torch.device) -> int:
    """The same, in bytes, for plans of any batch outside CUDA graphs."""
    return _output_bytes(_splits(num_kv_heads, device) * _TILES[-1], num_heads, head_size)


def _splits(num_kv_heads: int, device: torch.device) -> int:
    """Most work items that split-KV makes."""
    return 2 * _processors(device) // num_kv_heads


def _output_bytes(rows: int, num_heads: int, head_size: int) -> int:
    return 4 * num_heads * rows * (head_size + 1)


def _tile(rows: int) -> int:
    return next((tile for tile in _TILES if rows <= tile), _TILES[-1])


def _query_tokens(wrapper: Any) -> int:
    """Most query tokens of a planned request. Decode wrappers have the second name, and take several from 0.7 on."""
    return max(getattr(wrapper, "_max_q_len", 1), getattr(wrapper, "_q_len_per_req", None) or 1)


def _carry_chunks(wrapper: Any, seq_lens: torch.Tensor) -> None:
    given = getattr(wrapper, "kept", None) or _chunk_arguments(wrapper, seq_lens.shape[0])
    if given is not None:
        set_chunks(seq_lens, *given)


def _chunk_arguments(wrapper: Any, requests: int) -> tuple[Any, ...] | None:
    """Arguments of `set_chunks` after the lengths; None without split-KV."""
    info = wrapper._plan_info
    if len(info) != _PLAN_SIZE:
        raise PlanError(f"a plan of {type(wrapper).__name__} with {len(info)} numbers can't be corrected on the device")
    if not info[_SPLIT]:
        return None
    plan = [int(number) for number in info]
    ints, window = wrapper._int_workspace_buffer.view(torch.int32), wrapper._window_left
    chunks = _at(ints, plan[_CHUNKS], plan[_WORKS])
    return (
        wrapper._qo_indptr_buf[: requests + 1],
        _INT32_MAX if window < 0 else window + plan[_TILE],
        _at(ints, plan[_CHUNK_SIZE], 1),
        _at(ints, plan[_REQUESTS], plan[_WORKS]),
        chunks,
        chunks,
        _at(ints, plan[_OUTPUT_INDPTR], requests + 1),
        _at(ints, plan[_MERGE_INDPTR], plan[_QUERY_TOKENS] + 1),
    )


def _at(ints: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    return ints[offset // _INT32_BYTES :][:count]


@functools.cache
def _least_tile(device: torch.device) -> int:
    """The smallest tile, in rows: 64 before Ampere, else 16."""
    before_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return _TILES[1 if before_ampere else 0]


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class PlanBuffers:
    """Pinned buffers that wrappers' plans fill in turn, each fenced by its copy to the device.

    Args:
        depth: plans that may be in flight before the next one waits; the wait is counted.
        nbytes: size of each buffer, at least that of the wrappers' own buffers.
        device: the wrappers' device.
    """

    def __init__(self, depth: int, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._ring = PinnedRing((nbytes,), torch.uint8, depth=depth, device=device)
        self._lent = False

    def lend(self, wrapper: Any) -> None:
        """Let the next plan of `wrapper` fill the oldest buffer.

        Raises:
            PlanError: the wrapper's own buffer is larger.
        """
        own = wrapper._pin_memory_int_workspace_buffer.nbytes
        if own > self._nbytes:
            raise PlanError(
                f"the plan of {type(wrapper).__name__} needs {own} bytes, but each buffer has {self._nbytes}"
            )
        self.planned()
        wrapper._pin_memory_int_workspace_buffer = self._ring.next()
        self._lent = True

    def planned(self) -> None:
        """Fence the buffer last lent; call this after the plan, when its copy is on the stream."""
        if self._lent:
            self._ring.fence()
            self._lent = False
