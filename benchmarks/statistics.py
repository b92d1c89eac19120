"""Ratios of speeds, how far they can be trusted, and when they are omitted (docs/benchmarks.md, "Noise").

Runs of a turn share its process, memory layout and clocks. So only their median counts, and they are never treated as
independent. A bootstrap of four values covers the true ratio far less often than stated. The sign-flip interval needs
no normality, but can't reach 95 % with fewer than six passes.
"""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of speeds, above one where the other arm is faster, and its confidence interval."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def noise(self) -> float:
        """Half the interval's width, as a share: what two equal arms differ by in all but one case of twenty."""
        return math.sqrt(self.high / self.low) - 1


def paired_ratio(reference: Sequence[float], other: Sequence[float]) -> Interval | None:
    """The ratio of `other` to `reference`, one value for each pass; None for fewer than two passes."""
    logs = [math.log(b / a) for a, b in zip(reference, other, strict=True)]
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def ratio_in_words(reference: Sequence[float], other: Sequence[float]) -> str:
    """`paired_ratio` with its interval, such as `1.041 (1.037-1.045)`."""
    found = paired_ratio(reference, other)
    return "one pass only" if found is None else f"{found.value:.3f} ({found.low:.3f}-{found.high:.3f})"


def by_turns(arms: Collection[str], passes: int, turn: Callable[[str], float]) -> dict[str, list[float]]:
    """Measure arms that take turns in one process, two turns each in a pass: ABC CBA. `turn` runs one turn of an arm.

    For each arm returns one value for each pass: the mean of its two turns.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(passes):
        turns: dict[str, list[float]] = {name: [] for name in arms}
        for name in (*arms, *reversed([*arms])):
            turns[name].append(turn(name))
        for name, values in turns.items():
            found[name].append(statistics.fmean(values))
    return found


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of single calls, and how many there were."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "n": len(values)}


def refusal(control: Interval | None) -> str | None:
    """Why ratios must be omitted, given the ratio of the noop arm to stock; None if they may be given."""
    if control is None:
        return "fewer than two control passes"
    if control.low <= 1 <= control.high:
        return None
    return (
        f"the noop arm, which is stock in all but name, differs from stock by {control.value - 1:+.1%}, more than the "
        f"noise of ±{control.noise:.1%}; differences of other arms can't be trusted"
    )


def student_quantile(degrees: int) -> float:
    """The t that Student's distribution stays within, on both sides, with probability `CONFIDENCE`."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < CONFIDENCE:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| < t): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = total = 0.0
    if degrees > 1:
        term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
