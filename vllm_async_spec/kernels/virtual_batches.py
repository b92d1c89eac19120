"""Chunked local attention as causal attention over virtual batches, which the device cuts at chunk ends.

Under chunked local attention a token at position `p` sees the keys from `p // chunk * chunk` to `p`. So a request
whose query tokens lie in several chunks equals several requests of ordinary causal attention. These are the *virtual
batches*, each with the keys of one chunk. The cuts depend on the exact length, but the largest number of pieces does
not: `virtual_batches` gives it. Rows that the exact length does not need have no query tokens and no keys.

Importing this module does not import Triton; the first call on a CUDA tensor does.
"""

from __future__ import annotations

import functools

import torch

from vllm_async_spec.kernels.triton_kernels import kernels_of, runs_as_triton


def virtual_batches(query_lens: torch.Tensor, chunk: int) -> torch.Tensor:
    """The most chunks that a request's query tokens can lie in, wherever they begin: 1 for up to one token.

    Args:
        query_lens: (batch,) int32, host or device.
        chunk: tokens in a chunk.

    Returns:
        (batch,) of the same dtype, on the same device.
    """
    return 1 + ((query_lens - 1).clamp(min=0) + chunk - 1).div(chunk, rounding_mode="floor")


def split_by_chunks(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    chunk: int,
    virtual_start_loc: torch.Tensor,
    virtual_seq_lens: torch.Tensor,
    requests: torch.Tensor,
    chunks: torch.Tensor,
) -> None:
    """Cut every request at its chunk boundaries. Launches one kernel and waits for nothing.

    Args:
        query_start_loc: (batch + 1,) int32, device.
        seq_lens: (batch,) int32, device: exact lengths, in tokens.
        chunk: tokens in a chunk.
        virtual_start_loc: (rows + 1,) int32, device; written. `rows` is the sum of `virtual_batches`.
        virtual_seq_lens: (rows,) int32, device; written: keys of each row, from its chunk's first token on.
        requests: (rows,) int32, device; written: the request of each row.
        chunks: (rows,) int32, device; written: each row's chunk number in its request's sequence.
    """
    out = virtual_start_loc, virtual_seq_lens, requests, chunks
    if not runs_as_triton(seq_lens):
        split_by_chunks_reference(query_start_loc, seq_lens, chunk, *out)
        return
    kernels_of(__name__).split_by_chunks[(seq_lens.shape[0],)](
        query_start_loc, seq_lens, *out, virtual_seq_lens.shape[0], CHUNK=chunk, BLOCK=_BLOCK
    )


def split_by_chunks_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    chunk: int,
    virtual_start_loc: torch.Tensor,
    virtual_seq_lens: torch.Tensor,
    requests: torch.Tensor,
    chunks: torch.Tensor,
) -> None:
    """`split_by_chunks` in PyTorch."""
    starts = query_start_loc[:-1]
    query_lens = query_start_loc[1:] - starts
    # A padding row may be shorter than its query; the clamp keeps chunk numbers from being negative.
    computed = (seq_lens - query_lens).clamp(min=0)
    ends = virtual_batches(query_lens, chunk).cumsum(0, dtype=torch.int32)
    rows = torch.arange(requests.shape[0], dtype=torch.int32, device=seq_lens.device)
    request = torch.searchsorted(ends, rows, right=True)
    first = ends - virtual_batches(query_lens, chunk)
    number = computed.div(chunk, rounding_mode="floor")[request] + rows - first[request]
    # Query tokens of the request that lie before this chunk, and before the next.
    before = (number * chunk - computed[request]).clamp(min=0).minimum(query_lens[request])
    until = ((number + 1) * chunk - computed[request]).clamp(min=0).minimum(query_lens[request])
    keys = (seq_lens[request] - number * chunk).clamp(0, chunk)
    virtual_start_loc[:-1] = starts[request] + before
    virtual_start_loc[-1:] = query_start_loc[-1:]
    virtual_seq_lens.copy_(torch.where(until > before, keys, 0))
    requests.copy_(request)
    chunks.copy_(number)


def gather_pages(block_table: torch.Tensor, requests: torch.Tensor, chunks: torch.Tensor, pages: int) -> torch.Tensor:
    """The pages of each virtual batch. Launches one kernel and waits for nothing.

    Args:
        block_table: (batch, width) int32, device.
        requests: (rows,) int32, device: as `split_by_chunks` writes them.
        chunks: (rows,) int32, device: as `split_by_chunks` writes them.
        pages: pages in a chunk.

    Returns:
        (rows, pages) int32, device. Beyond the block table's width its last column is repeated.
    """
    if not runs_as_triton(block_table):
        return gather_pages_reference(block_table, requests, chunks, pages)
    out = block_table.new_empty(requests.shape[0], pages)
    kernels_of(__name__).gather_pages[(requests.shape[0],)](
        block_table,
        requests,
        chunks,
        out,
        block_table.stride(0),
        block_table.stride(1),
        block_table.shape[1] - 1,
        PAGES=pages,
        BLOCK=_BLOCK,
    )
    return out


def gather_pages_reference(
    block_table: torch.Tensor, requests: torch.Tensor, chunks: torch.Tensor, pages: int
) -> torch.Tensor:
    """`gather_pages` in PyTorch."""
    page = chunks[:, None] * pages + torch.arange(pages, dtype=torch.int32, device=chunks.device)
    return block_table[requests[:, None].long(), page.clamp(max=block_table.shape[1] - 1).long()]


def compile_virtual_batches(chunk: int, pages: int, device: torch.device) -> None:
    """Compile and load both kernels, so that no request waits for it; does nothing on a CPU.

    Args:
        chunk: tokens in a chunk.
        pages: pages in a chunk.
        device: where the kernels will run.
    """
    if device.type != "cuda":
        return
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    split_by_chunks(zeros(2), zeros(1), chunk, zeros(2), zeros(1), zeros(1), zeros(1))
    gather_pages(zeros(1, 1), zeros(1), zeros(1), pages)


_BLOCK = 128
