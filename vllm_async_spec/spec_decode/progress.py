"""Computed tokens of each row of a batch, carried on the device from one step to the next.

The host prepares a step before it knows how many drafts of the last step were accepted. The host remembers which rows
had drafts, and which row each request comes from. The device keeps the computed tokens of each row when the step began,
and gets the accepted counts. `correct` adds the two on the device, and writes the tokens that only the device knows
into the step's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from vllm_async_spec.host_copy import PinnedRing
from vllm_async_spec.kernels import ROW_FIELDS, LastStep, StepInputs, correct_inputs

_IN_FLIGHT = 2
"""Steps that the engine has launched, but whose results it has not seen."""


class DeviceProgress:
    """The computed tokens of each row of the last step, and of the step being prepared.

    Args:
        rows: most rows of a batch.
        device: where the progress is kept.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # Two buffers, because one request's old row may be another request's new row.
        self._carry, self._next_carry = torch.zeros(2, rows, dtype=torch.int32, device=device).unbind(0)
        self._counts = torch.ones(rows, dtype=torch.int32, device=device)
        self._staged = torch.zeros(ROW_FIELDS, rows, dtype=torch.int32, device=device)
        self._staging = PinnedRing((ROW_FIELDS, rows), torch.int32, depth=_IN_FLIGHT + 1, device=device)
        self._fetching = PinnedRing((rows,), torch.int32, depth=_IN_FLIGHT + 1, device=device)
        self._fetched: torch.Tensor | None = None
        # One more entry, always zero: row -1, for requests without a row in the last step.
        self._drafts = np.zeros(rows + 1, dtype=np.int32)

    @property
    def drafted(self) -> bool:
        """Whether any row of the last step had drafts."""
        return bool(self._drafts.any())

    def most_counts(self, rows: int) -> list[int]:
        """Accepted count of each of the first `rows` rows of the last step, if all drafts were accepted."""
        counts: list[int] = (self._drafts[:rows] + 1).tolist()
        return counts

    def sampled(self, counts: torch.Tensor) -> None:
        """Keep the step's accepted counts.

        Args:
            counts: (rows of the step,) int32, device: new tokens of each row. Kept until the next step's; not copied.
        """
        self._counts = counts

    def correct(
        self,
        requests: Sequence[str],
        came_from: Mapping[str, int],
        computed: npt.NDArray[np.int32],
        drafts: npt.NDArray[np.int32] | None,
        sampled: torch.Tensor,
        drafted: torch.Tensor,
        sent: StepInputs,
    ) -> None:
        """Overwrite the host's inputs of the step being prepared with exact progress and tokens.

        Args:
            requests: the request of each row.
            came_from: row in the last step of each request that was sampled there and has stayed in the batch.
            computed: (rows,) int32, host: computed tokens of each row, as if all drafts of the last step had been
                accepted.
            drafts: (rows,) int32, host: drafts that this step verifies for each row; None if there are none.
            sampled: (rows of the last step, 1 or more) int32, device: see `LastStep`.
            drafted: (rows of the last step, K) int64, device: the last step's drafts.
            sent: inputs of this step; written.
        """
        batch = len(requests)
        staging = self._staging.next()
        told: npt.NDArray[np.int32] = staging.numpy()[:, :batch]
        corrected_from, rows_before, assumed, verifies, draft_ends = told
        rows_before[:] = np.fromiter(map(came_from.get, requests, repeat(-1)), np.int32, batch)
        corrected_from[:] = np.where(self._drafts[rows_before], rows_before, -1)
        assumed[:] = computed
        self._drafts.fill(0)
        if drafts is not None:
            self._drafts[:batch] = drafts
        verifies[:] = self._drafts[:batch]
        np.cumsum(verifies, out=draft_ends)
        self._staged.copy_(staging, non_blocking=True)
        self._staging.fence()
        last = LastStep(self._carry, self._counts, sampled, drafted)
        correct_inputs(last, self._staged, batch, self._next_carry, sent)
        self._carry, self._next_carry = self._next_carry, self._carry

    def fetch(self, rows: int) -> None:
        """Start copying each row's computed tokens to the host, for a caller that will wait for the step's counts."""
        host = self._fetching.next()
        host[:rows].copy_(self._carry[:rows], non_blocking=True)
        self._fetching.fence()
        self._fetched = host

    def fetched(self) -> list[int]:
        """Computed tokens of each row when the last step began. Valid after a wait for work launched after `fetch`."""
        assert self._fetched is not None
        began: list[int] = self._fetched.tolist()
        return began
