"""The Triton kernel of `device_positions`, which says what it computes."""

# No `from __future__ import annotations` here: Triton reads the annotations of its constants.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["axis_stride"])  # type: ignore[untyped-decorator]
def correct_positions(  # type: ignore[no-untyped-def]
    carry,
    counts,
    previous,
    computed,
    query_start_loc,
    next_carry,
    seq_lens,
    positions,
    axes,
    axis_stride,
    addresses,
    AXES: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0)
    came_from = tl.load(previous + row)
    exact = tl.load(computed + row)
    if came_from >= 0:
        assumed = exact
        exact = tl.minimum(tl.load(carry + came_from) + tl.load(counts + came_from).to(tl.int32), assumed)
        start = tl.load(query_start_loc + row)
        tokens = tl.load(query_start_loc + row + 1) - start
        tl.store(seq_lens + row, exact + tokens)
        for begin in range(0, tokens, BLOCK):
            within = begin + tl.arange(0, BLOCK)
            mask = within < tokens
            token = start + within
            position = (exact + within).to(tl.int64)
            tl.store(positions + token, position, mask=mask)
            for group in tl.static_range(GROUPS):
                table = tl.load(addresses + group * 4).to(tl.pointer_type(tl.int32))
                stride = tl.load(addresses + group * 4 + 1)
                size = tl.load(addresses + group * 4 + 2)
                slots = tl.load(addresses + group * 4 + 3).to(tl.pointer_type(tl.int64))
                page = tl.load(table + row * stride + position // size, mask=mask, other=0).to(tl.int64)
                tl.store(slots + token, page * size + position % size, mask=mask)
            for axis in tl.static_range(AXES):
                place = axes + axis * axis_stride + token
                tl.store(place, tl.load(place, mask=mask, other=0) + (exact - assumed), mask=mask)
    tl.store(next_carry + row, exact)
