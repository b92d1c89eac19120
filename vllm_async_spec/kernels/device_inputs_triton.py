"""The Triton kernel of `device_inputs`, which documents it."""

# No `from __future__ import annotations` here: Triton reads the annotations of its constants.
import triton.language as tl

from vllm_async_spec.kernels.compiled_once import compiled_once


@compiled_once("sampled_stride", "draft_row_stride", "draft_stride", "row_stride")
def correct_inputs(  # type: ignore[no-untyped-def]
    carry,
    counts,
    sampled,
    sampled_stride,
    drafts,
    draft_row_stride,
    draft_stride,
    rows,
    row_stride,
    next_carry,
    addresses,
    AXES: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row."""
    query_start_loc = tl.load(addresses).to(tl.pointer_type(tl.int32))
    input_ids = tl.load(addresses + 1).to(tl.pointer_type(tl.int32))
    verified = tl.load(addresses + 2).to(tl.pointer_type(tl.int32))
    row = tl.program_id(0)
    corrected_from = tl.load(rows + row)
    came_from = tl.load(rows + row_stride + row)
    exact = tl.load(rows + 2 * row_stride + row)
    verifies = tl.load(rows + 3 * row_stride + row)
    draft_end = tl.load(rows + 4 * row_stride + row)
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    if came_from >= 0:
        tl.store(input_ids + end - 1 - verifies, tl.load(sampled + came_from * sampled_stride))
    for begin in range(0, verifies, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        here = number < verifies
        place = input_ids + end - verifies + number
        if came_from >= 0:
            draft = drafts + came_from * draft_row_stride + number * draft_stride
            token = tl.load(draft, mask=here, other=0).to(tl.int32)
            tl.store(place, token, mask=here)
        else:
            token = tl.load(place, mask=here, other=0)
        tl.store(verified + draft_end - verifies + number, token, mask=here)
    if corrected_from >= 0:
        positions = tl.load(addresses + 3).to(tl.pointer_type(tl.int64))
        seq_lens = tl.load(addresses + 4).to(tl.pointer_type(tl.int32))
        axes = tl.load(addresses + 5).to(tl.pointer_type(tl.int64))
        axis_stride = tl.load(addresses + 6)
        assumed = exact
        exact = tl.minimum(tl.load(carry + corrected_from) + tl.load(counts + corrected_from).to(tl.int32), assumed)
        tokens = end - start
        tl.store(seq_lens + row, exact + tokens)
        for begin in range(0, tokens, BLOCK):
            within = begin + tl.arange(0, BLOCK)
            mask = within < tokens
            at = start + within
            position = (exact + within).to(tl.int64)
            tl.store(positions + at, position, mask=mask)
            for group in tl.static_range(GROUPS):
                paged = addresses + 7 + group * 4
                table = tl.load(paged).to(tl.pointer_type(tl.int32))
                stride = tl.load(paged + 1)
                size = tl.load(paged + 2)
                slots = tl.load(paged + 3).to(tl.pointer_type(tl.int64))
                page = tl.load(table + row * stride + position // size, mask=mask, other=0).to(tl.int64)
                tl.store(slots + at, page * size + position % size, mask=mask)
            for axis in tl.static_range(AXES):
                ahead = axes + axis * axis_stride + at
                tl.store(ahead, tl.load(ahead, mask=mask, other=0) + (exact - assumed), mask=mask)
    tl.store(next_carry + row, exact)
