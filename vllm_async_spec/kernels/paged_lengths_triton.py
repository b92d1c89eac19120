"""The Triton kernels of `paged_lengths`, which says what they compute."""

# No `from __future__ import annotations` here: Triton reads the annotations of its constants.
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def last_page_lens(seq_lens, page_indptr, out, batch, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each BLOCK requests."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = request < batch
    pages = tl.load(page_indptr + request + 1, mask=mask) - tl.load(page_indptr + request, mask=mask)
    tl.store(out + request, tl.load(seq_lens + request, mask=mask) - (pages - 1) * PAGE_SIZE, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def work_lens(seq_lens, requests, count, out, works, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each BLOCK pieces of work."""
    work = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (work < works) & (work < tl.load(count))
    request = tl.load(requests + work, mask=mask, other=0)
    tl.store(out + work, tl.load(seq_lens + request, mask=mask), mask=mask)
