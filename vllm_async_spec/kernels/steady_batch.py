"""Inputs of a step whose batch is that of the step before, each row with all its drafts to verify.

The device has all that such a step needs: where each request was, how many tokens the last step accepted, its newest
token and its drafts. One kernel launch makes the inputs from these.

Importing this module does not import Triton; the first call on a CUDA tensor does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm_async_spec.kernels.triton_kernels import kernels_of, runs_as_triton


@dataclass(frozen=True)
class BatchInputs:
    """A step's device buffers; all are written. They must keep their addresses: the kernel takes a table of these."""

    computed: torch.Tensor
    """(rows,) int32: computed tokens of each row; read, and advanced by the accepted ones."""
    accepted: torch.Tensor
    """(rows,) int32: tokens that the last step accepted of each row; 1 behind the batch."""
    discarded: torch.Tensor
    """(rows,) bool: whether a row's sampled tokens are dropped; no row's are."""
    query_start_loc: torch.Tensor
    """(rows + 1,) int32; all tokens behind the batch."""
    seq_lens: torch.Tensor
    """(rows,) int32; 0 behind the batch."""
    positions: torch.Tensor
    """(tokens or more,) int64."""
    input_ids: torch.Tensor
    """(tokens or more,) int32."""

    @functools.cached_property
    def addresses(self) -> torch.Tensor:
        """(7,) int64, device: the addresses of the fields in order."""
        fields = (self.computed, self.accepted, self.discarded, self.query_start_loc, self.seq_lens)
        values = [field.data_ptr() for field in (*fields, self.positions, self.input_ids)]
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.seq_lens.device)


def advance_batch(
    counts: torch.Tensor, sampled: torch.Tensor, drafts: torch.Tensor, batch: int, inputs: BatchInputs
) -> None:
    """Make the inputs of a step in which each of `batch` rows has one token and all its drafts. Launches one kernel.

    Args:
        counts: (batch or more,) int32 or int64, device: tokens that the last step accepted of each row.
        sampled: (batch or more, 1 or more) int32, device: the newest token of each row, in the first column.
        drafts: (batch or more, K) int32 or int64, device: the drafts after that token.
        batch: rows of the step.
        inputs: written.
    """
    if not runs_as_triton(counts):
        advance_batch_reference(counts, sampled, drafts, batch, inputs)
        return
    kernels_of(__name__).advance_batch[(batch + 1,)](
        counts,
        sampled,
        sampled.stride(0),
        drafts,
        drafts.stride(0),
        drafts.stride(1),
        inputs.addresses,
        batch,
        drafts.shape[1] + 1,
        inputs.seq_lens.shape[0],
        BLOCK=_BLOCK,
    )


def advance_batch_reference(
    counts: torch.Tensor, sampled: torch.Tensor, drafts: torch.Tensor, batch: int, inputs: BatchInputs
) -> None:
    """`advance_batch` in PyTorch."""
    tokens = drafts.shape[1] + 1
    inputs.computed[:batch] += counts[:batch].int()
    inputs.accepted[:batch] = counts[:batch]
    inputs.accepted[batch:] = 1
    inputs.discarded.zero_()
    ends = torch.arange(inputs.query_start_loc.shape[0], device=counts.device)
    inputs.query_start_loc.copy_(ends.clamp(max=batch) * tokens)
    inputs.seq_lens[:batch] = inputs.computed[:batch] + tokens
    inputs.seq_lens[batch:] = 0
    within = torch.arange(tokens, device=counts.device)
    inputs.positions[: batch * tokens].view(batch, tokens).copy_(inputs.computed[:batch, None] + within)
    rows = inputs.input_ids[: batch * tokens].view(batch, tokens)
    rows[:, 0] = sampled[:batch, 0]
    rows[:, 1:] = drafts[:batch]


def compile_advance_batch(device: torch.device) -> None:
    """Compile and load the kernel for vLLM's dtypes, so that no request waits for it; does nothing on a CPU."""
    if device.type != "cuda":
        return
    row = functools.partial(torch.ones, dtype=torch.int32, device=device)
    inputs = BatchInputs(row(1), row(1), row(1).bool(), row(2), row(1), row(2).long(), row(2))
    advance_batch(row(1), row(1, 1), row(1, 1).long(), 1, inputs)


_BLOCK = 16
"""Tokens handled at once; a row has one more than it has drafts."""
