"""Correction of a step's inputs on the device, from the results of the last step.

The host prepares a step without waiting for the last one, as if every draft had been accepted. These inputs are right
for each request without drafts in the last step. For the others the device adds accepted counts to the tokens that were
computed when the last step began. Sampled tokens and the drafts after them are on the device alone, for every request
of the last step. One kernel launch writes all corrections.

Importing this module does not import Triton; the first call on a CUDA tensor does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_async_spec.kernels.triton_kernels import kernels_of, runs_as_triton


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Pages and slots of one KV cache group."""

    block_table: torch.Tensor
    """(rows, width) int32, device, rows contiguous: the pages of each row's request."""
    page_size: int
    """Tokens in a page."""
    slot_mapping: torch.Tensor
    """(tokens,) int64, device: the slot of each token of a step."""


@dataclass(frozen=True, slots=True)
class LastStep:
    """Device results of the last step, by that step's rows."""

    carry: torch.Tensor
    """(rows,) int32: computed tokens when that step began."""
    counts: torch.Tensor
    """(rows,) int32: new tokens of the row, at least 1."""
    sampled: torch.Tensor
    """(rows, 1 or more) int32: the last new token, in the first column."""
    drafts: torch.Tensor
    """(rows, K) int64: the drafts after that token."""


@dataclass(frozen=True)
class StepInputs:
    """A step's device buffers, which hold the host's inputs and are corrected in place.

    The buffers must keep their addresses. The kernel takes a table of addresses, which launches faster than one
    argument for each buffer.
    """

    query_start_loc: torch.Tensor
    """(batch + 1 or more,) int32; only read."""
    input_ids: torch.Tensor
    """(tokens or more,) int32."""
    verified: torch.Tensor
    """(drafts or more,) int32: the drafts among the input tokens, row after row."""
    positions: torch.Tensor
    """(tokens or more,) int64."""
    seq_lens: torch.Tensor
    """(batch or more,) int32."""
    axes: torch.Tensor | None
    """(axes, tokens or more) int64, each axis contiguous, or None: positions of M-RoPE or XD-RoPE."""
    paged: Sequence[PagedGroup]
    """The KV cache groups, whose slot mappings are written."""

    @functools.cached_property
    def addresses(self) -> torch.Tensor:
        """(7 + 4 a group,) int64, device: addresses of the fields in order, then the stride of `axes`; for each group
        its block table, the table's row stride, page size and slot mapping.
        """
        axes = (0, 0) if self.axes is None else (self.axes.data_ptr(), self.axes.stride(0))
        buffers = (self.query_start_loc, self.input_ids, self.verified, self.positions, self.seq_lens)
        values = [*(buffer.data_ptr() for buffer in buffers), *axes]
        for group in self.paged:
            table = group.block_table
            values += [table.data_ptr(), table.stride(0), group.page_size, group.slot_mapping.data_ptr()]
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.seq_lens.device)


ROW_FIELDS = 5
"""int32 that the host sends for each row: `corrected_from`, `came_from`, `computed`, `drafts` and `draft_ends`."""


def correct_inputs(last: LastStep, rows: torch.Tensor, batch: int, next_carry: torch.Tensor, sent: StepInputs) -> None:
    """Replace the host's assumptions with the results of the last step. Launches one kernel.

    A row whose request had no drafts in the last step keeps the positions and length that the host sent. A request
    never has more computed tokens than the host assumes. A larger sum, after the scheduler took tokens back, is cut to
    the host's number.

    Args:
        last: results of the last step.
        rows: (`ROW_FIELDS`, batch or more) int32, device, each field contiguous. `corrected_from`: the request's row in
            the last step if it had drafts there, else -1. `came_from`: the request's row in the last step if it was
            sampled there, else -1; with -1 its tokens stay as sent. `computed`: computed tokens that the host assumes.
            `drafts`: drafts that this step verifies for the row, at the end of its tokens. `draft_ends`: running sum of
            `drafts`.
        batch: rows of this step.
        next_carry: (rows,) int32, device, no part of `last.carry`; the first `batch` are written: computed tokens.
        sent: inputs of this step; written.
    """
    if not runs_as_triton(next_carry):
        correct_inputs_reference(last, rows, batch, next_carry, sent)
        return
    kernels_of(__name__).correct_inputs[(batch,)](
        last.carry,
        last.counts,
        last.sampled,
        last.sampled.stride(0),
        last.drafts,
        last.drafts.stride(0),
        last.drafts.stride(1),
        rows,
        rows.stride(0),
        next_carry,
        sent.addresses,
        AXES=0 if sent.axes is None else sent.axes.shape[0],
        GROUPS=len(sent.paged),
        BLOCK=_BLOCK,
    )


def correct_inputs_reference(
    last: LastStep, rows: torch.Tensor, batch: int, next_carry: torch.Tensor, sent: StepInputs
) -> None:
    """`correct_inputs` in PyTorch."""
    corrected_from, came_from, computed, drafts, draft_ends = rows[:, :batch].unbind(0)
    starts = sent.query_start_loc[: batch + 1]
    _correct_tokens(last, came_from, drafts, draft_ends, starts, sent)
    corrected = corrected_from >= 0
    source = corrected_from.clamp(min=0).long()
    # Only corrected rows use the gathered counts, so any valid index serves the others; there may be no counts at all.
    counts = last.counts
    accepted = counts[source.clamp(max=counts.shape[0] - 1)] if counts.shape[0] else torch.zeros_like(computed)
    exact = torch.where(corrected, (last.carry[source] + accepted).minimum(computed), computed).int()
    next_carry[:batch] = exact
    sent.seq_lens[:batch] = torch.where(corrected, exact + starts.diff(), sent.seq_lens[:batch])
    token = torch.arange(int(starts[-1]), device=rows.device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    token, row = token[corrected[row]], row[corrected[row]]
    position = exact[row].long() + token - starts[row]
    sent.positions[token] = position
    if sent.axes is not None:
        sent.axes[:, token] += (exact - computed)[row].long()
    for group in sent.paged:
        page = group.block_table[row, position // group.page_size].long()
        group.slot_mapping[token] = page * group.page_size + position % group.page_size


def _correct_tokens(
    last: LastStep,
    came_from: torch.Tensor,
    drafts: torch.Tensor,
    draft_ends: torch.Tensor,
    starts: torch.Tensor,
    sent: StepInputs,
) -> None:
    carried = came_from >= 0
    source = came_from[carried].long()
    sent.input_ids[(starts[1:] - 1 - drafts)[carried].long()] = last.sampled[source, 0]
    draft = torch.arange(int(draft_ends[-1]), device=starts.device)
    row = torch.searchsorted(draft_ends.contiguous(), draft, right=True)
    token = starts[1:][row] - draft_ends[row] + draft
    known, source = carried[row], came_from[row].long()
    number = draft - draft_ends[row] + drafts[row]
    sent.input_ids[token[known]] = last.drafts[source[known], number[known]].int()
    sent.verified[: len(draft)] = sent.input_ids[token]


_BLOCK = 16
"""Query tokens handled at once; a request with drafts has one more than it has drafts."""
