"""Stopping criteria that look at what is on the device: where they run, and in how few launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import EosTokenCriteria


class DeviceCriteria:
    """Criteria that the host can't decide.

    Ends of sequence are compared with the newest token by one operation, for all `EosTokenCriteria` together. All else
    is called, a criterion at a time, as transformers does.

    Args:
        criteria: any.
        device: of the sequences.
    """

    def __init__(self, criteria: Iterable[Any], device: torch.device) -> None:
        self._every = list(criteria)
        self._others = [each for each in self._every if type(each) is not EosTokenCriteria]
        ends = [each.eos_token_id.to(device).flatten() for each in self._every if type(each) is EosTokenCriteria]
        self._ends = torch.cat(ends) if ends else None
        self._has_one_end = self._ends is not None and len(self._ends) == 1
        self.beside = bool(self._others)
        """Whether they are worth a stream of their own: to change streams costs the host more than a comparison."""

    def finished(
        self, before: torch.Tensor | None, input_ids: torch.Tensor, scores: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Rows that have stopped at this step or before, on the current stream.

        Args:
            before: bool (batch,), rows that have stopped at an earlier step; None if there was none.
            input_ids: int64 (batch, length), with the token of this step.
            scores: handed to the criteria.
            kwargs: handed to the criteria.

        Returns:
            bool (batch,).
        """
        finished, called = before, self._others
        if kwargs:
            called = self._every  # they may say how many tokens are new
        elif self._ends is not None:
            newest = input_ids.select(1, -1)
            ended = newest == self._ends if self._has_one_end else torch.isin(newest, self._ends)
            finished = ended if finished is None else finished | ended
        if finished is None:
            finished = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for criterion in called:
            finished = finished | criterion(input_ids, scores, **kwargs)
        return finished
