"""The Triton kernels of `paged_lengths`, which documents them."""

# No `from __future__ import annotations` here: Triton reads the annotations of its constants.
import triton.language as tl

from vllm_async_spec.kernels.compiled_once import compiled_once


@compiled_once("page_size", "batch")
def last_page_lens(seq_lens, page_indptr, out, page_size, batch, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each BLOCK requests."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = request < batch
    pages = tl.load(page_indptr + request + 1, mask=mask) - tl.load(page_indptr + request, mask=mask)
    tl.store(out + request, tl.load(seq_lens + request, mask=mask) - (pages - 1) * page_size, mask=mask)


@compiled_once("row_stride", "page_size")
def pages(  # type: ignore[no-untyped-def]
    seq_lens, block_table, page_indptr, out_indices, out_lens, row_stride, page_size, BLOCK: tl.constexpr
):
    """One program for each request."""
    request, block = tl.program_id(0), tl.arange(0, BLOCK)
    first = tl.load(page_indptr + request)
    count = tl.load(page_indptr + request + 1) - first
    tl.store(out_lens + request, tl.load(seq_lens + request) - (count - 1) * page_size)
    row = block_table + request.to(tl.int64) * row_stride
    for start in range(0, count, BLOCK):
        page = start + block
        tl.store(out_indices + first + page, tl.load(row + page, mask=page < count), mask=page < count)


@compiled_once("works")
def work_lens(seq_lens, requests, count, out, works, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each BLOCK work items."""
    work = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (work < works) & (work < tl.load(count))
    request = tl.load(requests + work, mask=mask, other=0)
    tl.store(out + work, tl.load(seq_lens + request, mask=mask), mask=mask)


@compiled_once("limit", "batch", "works")
def chunks(  # type: ignore[no-untyped-def]
    seq_lens,
    query_indptr,
    limit,
    chunk_size,
    requests,
    planned_chunks,
    out_chunks,
    output_indptr,
    merge_indptr,
    batch,
    works,
    BLOCK: tl.constexpr,
):
    """One program for each request, and for each BLOCK work items."""
    program, block, size = tl.program_id(0), tl.arange(0, BLOCK), tl.load(chunk_size)

    if program < batch:
        # Every program sums the partial results before its request, which is cheaper than a second launch.
        before = 0
        for first in range(0, program, BLOCK):
            request = first + block
            mask = request < program
            length = tl.load(seq_lens + request, mask=mask, other=0)
            count = (tl.minimum(tl.maximum(length, 1), limit) + size - 1) // size
            begin = tl.load(query_indptr + request, mask=mask, other=0)
            end = tl.load(query_indptr + request + 1, mask=mask, other=0)
            before += tl.sum(count * (end - begin))

        count = (tl.minimum(tl.maximum(tl.load(seq_lens + program), 1), limit) + size - 1) // size
        begin = tl.load(query_indptr + program)
        tokens = tl.load(query_indptr + program + 1) - begin
        tl.store(output_indptr + program, before)
        for first in range(0, tokens, BLOCK):
            token = first + block
            tl.store(merge_indptr + begin + token, before + token * count, mask=token < tokens)
        if program == batch - 1:
            tl.store(output_indptr + batch, before + tokens * count)
            tl.store(merge_indptr + begin + tokens, before + tokens * count)

    work = program * BLOCK + block
    request = tl.load(requests + work, mask=work < works, other=-1)
    known = (request >= 0) & (request < batch)
    length = tl.load(seq_lens + request, mask=known, other=1)
    last = (tl.minimum(tl.maximum(length, 1), limit) + size - 1) // size - 1
    planned = tl.load(planned_chunks + work, mask=known, other=0)
    tl.store(out_chunks + work, tl.minimum(planned, last), mask=known)
