"""Exact lengths, written on the device into a plan that the host made from an upper bound.

A planned paged kernel (FlashInfer's) holds lengths in one of two places: as page counts with the length of the last
page, or copied into each piece of work. Both are device memory, so what the host did not know when it planned can be
written there before the kernel runs, in stream order and without a wait.

Importing this imports no Triton; the first call on a CUDA tensor does.
"""

from __future__ import annotations

import functools

import torch

from vllm_async_spec.kernels.triton_kernels import kernels_of, runs_as_triton


def set_last_page_lens(
    seq_lens: torch.Tensor, page_indptr: torch.Tensor, page_size: int, last_page_lens: torch.Tensor
) -> None:
    """Make page counts that are too high mean the exact lengths, by the length of the last page.

    A paged kernel reads a length as `(pages - 1) * page_size + last_page_len`. With the pages of an upper bound the
    last one's length becomes zero or negative wherever the exact length ends in an earlier page; the sum is exact.
    A request without pages has length 0 whatever is written.

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
    """`set_last_page_lens`, and the pages of each request where the plan's bound has put them.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        block_table: (batch or more, pages) int32, device: at least as wide as the bound of any request.
        page_indptr: (batch + 1,) int32, device: cumulative pages of an upper bound.
        page_size: tokens in a page.
        page_indices: (pages,) int32, device: of all requests, one after the other; written.
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
    """Give each piece of work the exact length of its request.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        requests: (works,) int32, device: the request of each piece of work.
        count: (1,) int32, device: how many pieces there are; what follows them in the other two is left alone.
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
    """Let a plan that splits keys have the chunks of the exact lengths, of which there are no more than were planned.

    A request has `cdiv(clamp(seq_len, 1, limit), chunk_size)` chunks. Each piece of work takes one of them; one whose
    chunk there is not takes the last, which is then computed twice with the same result. Partial results lie by
    request, by query token, by chunk.

    Args:
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        query_indptr: (batch + 1,) int32, device: cumulative query lengths.
        limit: most keys that a piece of work may see, in tokens: the window, if there is one.
        chunk_size: (1,) int32, device: keys in a chunk.
        requests: (works,) int32, device: the request of each piece of work; one that is none is left alone.
        planned_chunks: (works,) int32, device: the chunk that was planned for each.
        chunks: (works,) int32, device: the chunk of each; written. It may be `planned_chunks`.
        output_indptr: (batch + 1,) int32, device: cumulative partial results of the requests; written.
        merge_indptr: (query tokens + 1,) int32, device: cumulative partial results of the query tokens; written.
    """
    if not runs_as_triton(seq_lens):
        set_chunks_reference(
            seq_lens, query_indptr, limit, chunk_size, requests, planned_chunks, chunks, output_indptr, merge_indptr
        )
        return
    batch, works = seq_lens.shape[0], requests.shape[0]
    kernels_of(__name__).chunks[(max(batch, -(-works // _BLOCK)),)](
        seq_lens,
        query_indptr,
        limit,
        chunk_size,
        requests,
        planned_chunks,
        chunks,
        output_indptr,
        merge_indptr,
        batch,
        works,
        BLOCK=_BLOCK,
    )


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
    """Compile and load all kernels of this module now, so that no request waits for it; on a CPU there are none.

    Args:
        device: where they are going to run.
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
