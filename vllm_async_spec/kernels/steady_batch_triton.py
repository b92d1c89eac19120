"""The Triton kernel of `steady_batch`, which documents it."""

# No `from __future__ import annotations` here: Triton reads the annotations of its constants.
import triton.language as tl

from vllm_async_spec.kernels.compiled_once import compiled_once


@compiled_once("sampled_stride", "draft_row_stride", "draft_stride", "batch", "tokens", "size")
def advance_batch(  # type: ignore[no-untyped-def]
    counts,
    sampled,
    sampled_stride,
    drafts,
    draft_row_stride,
    draft_stride,
    addresses,
    batch,
    tokens,
    size,
    BLOCK: tl.constexpr,
):
    """One program for each row, and one for what is behind the batch."""
    accepted = tl.load(addresses + 1).to(tl.pointer_type(tl.int32))
    discarded = tl.load(addresses + 2).to(tl.pointer_type(tl.int8))
    query_start_loc = tl.load(addresses + 3).to(tl.pointer_type(tl.int32))
    seq_lens = tl.load(addresses + 4).to(tl.pointer_type(tl.int32))
    row = tl.program_id(0)
    if row == batch:
        for begin in range(batch, size + 1, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            tl.store(query_start_loc + place, batch * tokens, mask=place <= size)
            tl.store(seq_lens + place, 0, mask=place < size)
            tl.store(accepted + place, 1, mask=place < size)
            tl.store(discarded + place, 0, mask=place < size)
    else:
        computed_at = tl.load(addresses).to(tl.pointer_type(tl.int32)) + row
        positions = tl.load(addresses + 5).to(tl.pointer_type(tl.int64)) + row * tokens
        input_ids = tl.load(addresses + 6).to(tl.pointer_type(tl.int32)) + row * tokens
        count = tl.load(counts + row).to(tl.int32)
        computed = tl.load(computed_at) + count
        tl.store(computed_at, computed)
        tl.store(accepted + row, count)
        tl.store(discarded + row, 0)
        tl.store(query_start_loc + row, row * tokens)
        tl.store(seq_lens + row, computed + tokens)
        tl.store(input_ids, tl.load(sampled + row * sampled_stride).to(tl.int32))
        for begin in range(0, tokens, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            tl.store(positions + number, (computed + number).to(tl.int64), mask=number < tokens)
            drafted = (number > 0) & (number < tokens)
            draft = drafts + row * draft_row_stride + (number - 1) * draft_stride
            tl.store(input_ids + number, tl.load(draft, mask=drafted, other=0).to(tl.int32), mask=drafted)
