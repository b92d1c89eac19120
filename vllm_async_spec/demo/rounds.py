"""Which rounds count: the warm-up ends when the speeds of all engines are steady."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 2
"""Rounds that never count: they compile, allocate and fill caches."""
_STEADY = 0.2
"""How far a round may be from its engine's median, as a share of the median."""
_LIMIT = 4
"""After the warm-up, this many times the rounds asked for run at most."""
_PATIENCE_S = 60.0
"""Rounds beyond those asked for begin only while all rounds have taken less than this."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a comparison that count are the last `counted` of `run`."""

    run: int
    counted: int
    steady: bool
    """Whether each counted round of each engine is near the engine's median."""

    @property
    def warm_up(self) -> int:
        """The number of rounds before those that count."""
        return self.run - self.counted


def enough(speeds: Sequence[Sequence[float]], counted: int, took_s: float) -> Rounds | None:
    """The rounds that count, or None if another round must run.

    Args:
        speeds: tokens/s of each engine in each round so far.
        counted: the number of rounds that shall count.
        took_s: seconds that all rounds of all engines have taken.
    """
    run = min(map(len, speeds))
    timed = run - WARM_UP
    if timed < counted:
        return None
    steady = all(deviation(each[-counted:]) <= _STEADY for each in speeds)
    ends = steady or timed >= _LIMIT * counted or took_s >= _PATIENCE_S
    return Rounds(run, counted, steady) if ends else None


def deviation(speeds: Sequence[float]) -> float:
    """How far the furthest speed is from the median, as a share of the median."""
    median = statistics.median(speeds)
    return max(abs(speed - median) for speed in speeds) / median
