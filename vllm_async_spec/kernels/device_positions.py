"""Exact positions, lengths and KV slots, written on the device over those that the host made from an upper bound.

A host that did not wait for the accepted counts of the last step prepares the next one as if every draft had been
accepted. What it made is right for each request that had no draft in that step. For the others the device knows
better: it carries how many tokens of each request were computed when the last step began, and has the step's counts.
One launch adds the two, and writes what follows from the sum over what the host had sent.

Importing this imports no Triton; the first call on a CUDA tensor does.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Where one KV cache group keeps its tokens."""

    block_table: torch.Tensor
    """(rows, width) int32, device, rows contiguous: the pages of each row's request."""
    page_size: int
    """Tokens in a page."""
    slot_mapping: torch.Tensor
    """(tokens,) int64, device: the slot of each token of a step."""


class PagedGroups:
    """All KV cache groups of a runner, with the addresses of their tensors where a kernel finds them.

    The tensors must stay where they are: they are the runner's persistent buffers.

    Args:
        groups: at least one, all on one device.
    """

    def __init__(self, groups: Sequence[PagedGroup]) -> None:
        self.groups = tuple(groups)
        addresses = [
            (group.block_table.data_ptr(), group.block_table.stride(0), group.page_size, group.slot_mapping.data_ptr())
            for group in groups
        ]
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(groups[0].block_table.device)
        """(groups, 4) int64, device: block table, its row stride, page size, slot mapping."""


def correct_positions(
    carry: torch.Tensor,
    counts: torch.Tensor,
    previous: torch.Tensor,
    computed: torch.Tensor,
    query_start_loc: torch.Tensor,
    next_carry: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    axes: torch.Tensor | None,
    paged: PagedGroups,
) -> None:
    """Write what the accepted counts of the last step say over what the host has assumed. Launches one kernel.

    A row whose request had no draft in the last step is left as the host has sent it; only its carry is set. A request
    never has more computed tokens than the host assumes, so a sum beyond that (the scheduler has taken tokens back) is
    cut to it.

    Args:
        carry: (rows,) int32, device: computed tokens of each row of the last step when that began.
        counts: (rows of the last step,) int32, device: tokens that each row got in the last step, 1 at least.
        previous: (batch,) int32, device: the row that the request of each row had in the last step if it had drafts
            there, else -1.
        computed: (batch,) int32, device: computed tokens that the host assumes.
        query_start_loc: (batch + 1,) int32, device.
        next_carry: (rows,) int32, device, no part of `carry`; the first `batch` are written: computed tokens.
        seq_lens: (batch or more,) int32, device; written.
        positions: (tokens or more,) int64, device; written.
        axes: (axes, tokens or more) int64, device, each axis contiguous, or None: positions of M-RoPE or XD-RoPE, to
            which the difference is added.
        paged: the KV cache groups, whose slot mappings are written.
    """
    batch = previous.shape[0]
    if not carry.is_cuda and not _interpreted():
        correct_positions_reference(
            carry, counts, previous, computed, query_start_loc, next_carry, seq_lens, positions, axes, paged
        )
        return
    _kernels().correct_positions[(batch,)](
        carry,
        counts,
        previous,
        computed,
        query_start_loc,
        next_carry,
        seq_lens,
        positions,
        positions if axes is None else axes,
        0 if axes is None else axes.stride(0),
        paged.addresses,
        AXES=0 if axes is None else axes.shape[0],
        GROUPS=len(paged.groups),
        BLOCK=_BLOCK,
    )


def correct_positions_reference(
    carry: torch.Tensor,
    counts: torch.Tensor,
    previous: torch.Tensor,
    computed: torch.Tensor,
    query_start_loc: torch.Tensor,
    next_carry: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    axes: torch.Tensor | None,
    paged: PagedGroups,
) -> None:
    """`correct_positions` in PyTorch."""
    batch = previous.shape[0]
    drafted = previous >= 0
    came_from = previous.clamp(min=0).long()
    # The last step may have had fewer rows than this one, and none of the rows without drafts comes from them.
    accepted = counts[came_from.clamp(max=counts.shape[0] - 1)] if counts.shape[0] else torch.zeros_like(computed)
    exact = torch.where(drafted, (carry[came_from] + accepted).minimum(computed), computed).int()
    next_carry[:batch] = exact
    tokens = query_start_loc.diff()
    seq_lens[:batch] = torch.where(drafted, exact + tokens, seq_lens[:batch])
    token = torch.arange(int(query_start_loc[-1]), device=carry.device)
    row = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)
    token, row = token[drafted[row]], row[drafted[row]]
    position = exact[row].long() + token - query_start_loc[row]
    positions[token] = position
    if axes is not None:
        axes[:, token] += (exact - computed)[row].long()
    for group in paged.groups:
        page = group.block_table[row, position // group.page_size].long()
        group.slot_mapping[token] = page * group.page_size + position % group.page_size


_BLOCK = 16
"""Query tokens handled at once: a request with drafts has one more than those."""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("vllm_async_spec.kernels.device_positions_triton")
