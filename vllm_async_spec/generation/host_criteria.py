"""Stopping criteria that need no device: their verdict depends on the length and the clock alone, and is never late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import MaxLengthCriteria, MaxTimeCriteria

_KINDS = (MaxLengthCriteria, MaxTimeCriteria)
_ZERO = torch.zeros((1, 1), dtype=torch.long, device="cpu")


class HostCriteria:
    """Those of some stopping criteria that the host can decide.

    Args:
        criteria: any; the others are `rest`.
    """

    def __init__(self, criteria: Iterable[Any]) -> None:
        every = list(criteria)
        self._own = [each for each in every if type(each) in _KINDS]
        self.rest = [each for each in every if type(each) not in _KINDS]

    def stopped(self, length: int) -> bool:
        """Whether the length or the clock stops all rows now. A criterion sees ids of that length, all zero."""
        # No short cut: each is asked at each step, as in the synchronous loop.
        verdicts = [bool(each(_ZERO.expand(1, length), None)) for each in self._own if not _is_silent(each, length)]
        return any(verdicts)


def _is_silent(criterion: Any, length: int) -> bool:
    """Whether it neither stops nor warns at that length. To ask it would make a tensor, at each step."""
    if type(criterion) is not MaxLengthCriteria or length >= criterion.max_length:
        return False
    return criterion.max_position_embeddings is None or length <= criterion.max_position_embeddings
