"""The Triton kernels of `virtual_batches`, which documents them."""

# No `from __future__ import annotations` here: Triton reads the annotations of its constants.
import triton.language as tl

from vllm_async_spec.kernels.compiled_once import compiled_once


@compiled_once("rows")
def split_by_chunks(  # type: ignore[no-untyped-def]
    query_start_loc,
    seq_lens,
    virtual_start_loc,
    virtual_seq_lens,
    requests,
    chunks,
    rows,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each request."""
    request = tl.program_id(0)
    first = 0
    for begin in range(0, request, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        mask = other < request
        start = tl.load(query_start_loc + other, mask=mask, other=0)
        tokens = tl.load(query_start_loc + other + 1, mask=mask, other=0) - start
        most = 1 + (tl.maximum(tokens - 1, 0) + CHUNK - 1) // CHUNK
        first += tl.sum(tl.where(mask, most, 0))
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    length = tl.load(seq_lens + request)
    tokens = end - start
    # A padding row may be shorter than its query; the maximum keeps chunk numbers from being negative.
    computed = tl.maximum(length - tokens, 0)
    most = 1 + (tl.maximum(tokens - 1, 0) + CHUNK - 1) // CHUNK
    for begin in range(0, most, BLOCK):
        piece = begin + tl.arange(0, BLOCK)
        row = first + piece
        mask = (piece < most) & (row < rows)
        number = computed // CHUNK + piece
        before = tl.minimum(tl.maximum(number * CHUNK - computed, 0), tokens)
        until = tl.minimum(tl.maximum((number + 1) * CHUNK - computed, 0), tokens)
        keys = tl.minimum(tl.maximum(length - number * CHUNK, 0), CHUNK)
        tl.store(virtual_start_loc + row, start + before, mask=mask)
        tl.store(virtual_seq_lens + row, tl.where(until > before, keys, 0), mask=mask)
        tl.store(requests + row, request, mask=mask)
        tl.store(chunks + row, number, mask=mask)
    if request == tl.num_programs(0) - 1:
        tl.store(virtual_start_loc + rows, end)


@compiled_once("row_stride", "column_stride", "last_column")
def gather_pages(  # type: ignore[no-untyped-def]
    block_table,
    requests,
    chunks,
    out,
    row_stride,
    column_stride,
    last_column,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each virtual batch."""
    row = tl.program_id(0).to(tl.int64)
    source = block_table + tl.load(requests + row).to(tl.int64) * row_stride
    chunk = tl.load(chunks + row)
    for begin in range(0, PAGES, BLOCK):
        page = begin + tl.arange(0, BLOCK)
        mask = page < PAGES
        column = tl.minimum(chunk * PAGES + page, last_column)
        tl.store(out + row * PAGES + page, tl.load(source + column * column_stride, mask=mask), mask=mask)
