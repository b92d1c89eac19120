"""Exact lengths, written on the device into a plan that the host made from an upper bound.

FlashInfer's planned paged kernels hold lengths in one of two places: as page counts with the length of the last page,
or copied into each work item. Both are device memory. So kernels can write the exact lengths there before attention
runs, in stream order and without a wait.

Importing this module does not import Triton; the first call on a CUDA tensor does.
"""

from __future__ import annotations

import functools

import torch

from vllm_async_spec.kernels.triton_kernels import kernels_of, runs_as_triton


def set_last_page_lens(
    seq_lens: torch.Tensor, page_indptr: torch.Tensor, page_size: int, last_page_lens: torch.Tensor
) -> None:
    """Set the last page's length so that the page counts of an upper bound give the exact length.

    A paged kernel reads a length as `(pages - 1) * page_size + last_page_len`. If the exact length ends in an earlier
    page, `last_page_len` becomes zero or negative, and the sum is still exact. A request without pages has length 0
    whatever is written.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        page_indptr: (batch + 1,) int32, device: cumulative pages of an upper bound.
        page_size: tokens in a page.
        last_page_lens: (batch,) int32, device; written.
    """
    if not runs_as_triton(seq_lens):
        set_last_page_lens_reference(seq_lens, page_indptr, page_size, last_page_lens)
        return
    batch = last_page_lens.shape[0]
    kernels_of(__name__).last_page_lens[(-(-batch // _BLOCK),)](
        seq_lens, page_indptr, last_page_lens, page_size, batch, BLOCK=_BLOCK
    )


def set_last_page_lens_reference(
    seq_lens: torch.Tensor, page_indptr: torch.Tensor, page_size: int, last_page_lens: torch.Tensor
) -> None:
    """`set_last_page_lens` in PyTorch."""
    torch.sub(seq_lens, (page_indptr[1:] - page_indptr[:-1] - 1) * page_size, out=last_page_lens)


def set_pages(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_indptr: torch.Tensor,
    page_size: int,
    page_indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """`set_last_page_lens`, and write each request's page indices at the plan's offsets.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        block_table: (batch or more, pages) int32, device: at least as wide as the bound of any request.
        page_indptr: (batch + 1,) int32, device: cumulative pages of an upper bound.
        page_size: tokens in a page.
        page_indices: (pages,) int32, device: pages of all requests, one after the other; written.
        last_page_lens: (batch,) int32, device; written.
    """
    if not runs_as_triton(seq_lens):
        set_pages_reference(seq_lens, block_table, page_indptr, page_size, page_indices, last_page_lens)
        return
    kernels_of(__name__).pages[(last_page_lens.shape[0],)](
        seq_lens,
        block_table,
        page_indptr,
        page_indices,
        last_page_lens,
        block_table.stride(0),
        page_size,
        BLOCK=_BLOCK,
    )


def set_pages_reference(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_indptr: torch.Tensor,
    page_size: int,
    page_indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """`set_pages` in PyTorch."""
    set_last_page_lens_reference(seq_lens, page_indptr, page_size, last_page_lens)
    is_page = torch.arange(block_table.shape[1], device=block_table.device) < page_indptr.diff()[:, None]
    pages = block_table[: is_page.shape[0]][is_page]
    page_indices[: pages.shape[0]] = pages


def set_work_lens(seq_lens: torch.Tensor, requests: torch.Tensor, count: torch.Tensor, work_lens: torch.Tensor) -> None:
    """Write the exact length of its request into each work item.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        requests: (works,) int32, device: the request of each work item.
        count: (1,) int32, device: number of work items; later entries of `work_lens` are left alone.
        work_lens: (works,) int32, device; written.
    """
    if not runs_as_triton(seq_lens):
        set_work_lens_reference(seq_lens, requests, count, work_lens)
        return
    works = work_lens.shape[0]
    kernels_of(__name__).work_lens[(-(-works // _BLOCK),)](seq_lens, requests, count, work_lens, works, BLOCK=_BLOCK)


def set_work_lens_reference(
    seq_lens: torch.Tensor, requests: torch.Tensor, count: torch.Tensor, work_lens: torch.Tensor
) -> None:
    """`set_work_lens` in PyTorch."""
    is_work = torch.arange(work_lens.shape[0], device=work_lens.device) < count
    known = seq_lens[torch.where(is_work, requests, 0).long()]
    work_lens.copy_(torch.where(is_work, known, work_lens))


def set_chunks(
    seq_lens: torch.Tensor,
    query_indptr: torch.Tensor,
    limit: int,
    chunk_size: torch.Tensor,
    requests: torch.Tensor,
    planned_chunks: torch.Tensor,
    chunks: torch.Tensor,
    output_indptr: torch.Tensor,
    merge_indptr: torch.Tensor,
) -> None:
    """Set the chunks of a split-KV plan from the exact lengths, which never need more chunks than planned.

    A request has `cdiv(clamp(seq_len, 1, limit), chunk_size)` chunks, and each work item takes one chunk. A work item
    whose chunk no longer exists takes the last one, which is then computed twice with the same result. Partial results
    are ordered by request, then by query token, then by chunk.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        query_indptr: (batch + 1,) int32, device: cumulative query lengths.
        limit: most keys that a work item may see, in tokens: finite with a sliding window.
        chunk_size: (1,) int32, device: keys in a chunk.
        requests: (works,) int32, device: the request of each work item; items of no request are left alone.
        planned_chunks: (works,) int32, device: the planned chunk of each work item.
        chunks: (works,) int32, device: the chunk of each work item; written. May be `planned_chunks`.
        output_indptr: (batch + 1,) int32, device: cumulative partial results of the requests; written.
        merge_indptr: (query tokens + 1,) int32, device: cumulative partial results of the query tokens; written.
    """
    plan = query_indptr, limit, chunk_size, requests, planned_chunks, chunks, output_indptr, merge_indptr
    if not runs_as_triton(seq_lens):
        set_chunks_reference(seq_lens, *plan)
        return
    batch, works = seq_lens.shape[0], requests.shape[0]
    grid = (max(batch, -(-works // _BLOCK)),)
    kernels_of(__name__).chunks[grid](seq_lens, *plan, batch, works, BLOCK=_BLOCK)


def set_chunks_reference(
    seq_lens: torch.Tensor,
    query_indptr: torch.Tensor,
    limit: int,
    chunk_size: torch.Tensor,
    requests: torch.Tensor,
    planned_chunks: torch.Tensor,
    chunks: torch.Tensor,
    output_indptr: torch.Tensor,
    merge_indptr: torch.Tensor,
) -> None:
    """`set_chunks` in PyTorch."""
    counts = (seq_lens.clamp(1, limit) + chunk_size - 1) // chunk_size
    query_lens = query_indptr.diff()
    output_indptr.copy_(torch.nn.functional.pad((counts * query_lens).cumsum(0), (1, 0)))
    by_token = counts.repeat_interleave(query_lens)
    merge_indptr[: by_token.shape[0] + 1] = torch.nn.functional.pad(by_token.cumsum(0), (1, 0))
    batch = seq_lens.shape[0]
    known = (requests >= 0) & (requests < batch)
    last = counts[requests.clamp(0, batch - 1).long()] - 1
    chunks.copy_(torch.where(known, planned_chunks.minimum(last), chunks))


def compile_kernels(device: torch.device) -> None:
    """Compile and load all kernels of this module, so that no request waits for a compilation; does nothing on a CPU.

    Args:
        device: where the kernels will run.
    """
    if device.type != "cuda":
        return
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    set_last_page_lens(one, zeros(2), 1, zeros(1))
    set_work_lens(one, zeros(1), one, zeros(1))
    set_pages(one, zeros(1, 1), zeros(2), 1, zeros(1), zeros(1))
    set_chunks(one, zeros(2), 1, one, zeros(1), zeros(1), zeros(1), zeros(2), zeros(2))


_BLOCK = 256
