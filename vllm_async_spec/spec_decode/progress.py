"""How far each row of a batch has got, carried on the device from one step to the next.

The host never learns how many drafts of a step were accepted before it prepares the next one. It remembers which rows
had drafts, and which row each request comes from; the device remembers how many tokens of each row were computed when
the step began, and is given how many it got. `correct` adds the two where they are, and puts the tokens that only the
device knows among the step's.
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
"""Steps that the engine has launched and not seen the result of."""

_ALIGNED = 4
"""int32 in 16 bytes: Triton compiles a kernel anew for a pointer that is not aligned to them."""


class DeviceProgress:
    """The computed tokens of each row of the last step, and of the one being prepared.

    Args:
        rows: rows of a batch at most.
        device: where the progress is kept.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        pitch = -(-rows // _ALIGNED) * _ALIGNED
        # Two, because a request may come from a row that another request's progress is written to.
        self._carry, self._next_carry = torch.zeros(2, pitch, dtype=torch.int32, device=device).unbind(0)
        self._counts = torch.ones(rows, dtype=torch.int32, device=device)
        self._staged = torch.zeros(ROW_FIELDS, pitch, dtype=torch.int32, device=device)
        self._staging = PinnedRing((ROW_FIELDS, pitch), torch.int32, depth=_IN_FLIGHT + 1, device=device)
        self._fetching = PinnedRing((rows,), torch.int32, depth=_IN_FLIGHT + 1, device=device)
        self._fetched: torch.Tensor | None = None
        # One more, which is always zero: that of a request that comes from row -1, which is none.
        self._drafts = np.zeros(rows + 1, dtype=np.int32)

    @property
    def drafted(self) -> bool:
        """Whether any row of the last step had drafts."""
        return bool(self._drafts.any())

    def most_counts(self, rows: int) -> list[int]:
        """What each of the first `rows` rows of the last step got if all of its drafts were accepted."""
        counts: list[int] = (self._drafts[:rows] + 1).tolist()
        return counts

    def sampled(self, counts: torch.Tensor) -> None:
        """Take note of what the step gave.

        Args:
            counts: (rows of the step,) int32, device: tokens of each row. Kept until the next step's; not copied.
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
        """Write the exact progress of the step being prepared, and its tokens, over what the host has sent.

        Args:
            requests: the request of each row.
            came_from: request to its row in the last step, for those that were sampled in it and have been in the
                batch since.
            computed: (rows,) int32, host: computed tokens of each row, as if all drafts of the last step had been
                accepted.
            drafts: (rows,) int32, host: drafts that this step verifies of each row; None if there are none.
            sampled: (rows of the last step, 1 or more) int32, device: see `LastStep`.
            drafted: (rows of the last step, K) int64, device: its drafts.
            sent: written.
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
        """Start a copy of where each row of this step began, for somebody who is going to wait for its counts."""
        host = self._fetching.next()
        host[:rows].copy_(self._carry[:rows], non_blocking=True)
        self._fetching.fence()
        self._fetched = host

    def fetched(self) -> list[int]:
        """Where each row of the last step began. To be read after a wait for something that came later than `fetch`."""
        assert self._fetched is not None
        began: list[int] = self._fetched.tolist()
        return began
