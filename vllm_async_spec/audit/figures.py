"""What the terminal and the page both show of a report: key figures, facts and number formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_async_spec.audit.report import Cause, PhaseTime, Place, Report, Spread

T = TypeVar("T")

SIMULATED = (
    "Recorded on a CPU, where nothing waits for a device: these are the places that would wait on a GPU. "
    "They are counted, not timed."
)
"""Warning at the top of a simulated report."""

INCOMPARABLE = "The reports can't be compared: one was recorded on a CPU, the other on a GPU."

PLACES = {
    Place.CRITICAL: "the thread that launches the forward waited until the device had nothing left to do",
    Place.OVERLAPPED: "that thread waited, but the device still had work, or the awaited event had already happened",
    Place.HIDDEN: "another thread waited",
}

UNSEEN = "no Python call seen"
"""Shown in place of the site of a cause without a stack."""


_FIRST_LINE = ("vLLM", "device", "model")
"""Facts that the page shows above its headline."""
_SHARE = "% of the time"


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure of a report."""

    name: str
    unit: str
    value: float
    text: str
    """The value as it is written, without its unit."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pair(Generic[T]):
    """One item of two reports, before and after; None where a report lacks the item."""

    before: T | None
    after: T | None

    @property
    def either(self) -> T:
        """The item of after, or else that of before."""
        found = self.before if self.after is None else self.after
        if found is None:
            raise ValueError("a pair needs an item of before or of after")
        return found

    def all(self, *, compared: bool) -> tuple[T | None, ...]:
        """The items that a table shows: both in a comparison, else that of after."""
        return (self.before, self.after) if compared else (self.after,)


def key_figures(report: Report) -> tuple[Figure, ...]:
    """The figures that sum a report up, without times or device figures if none were measured."""
    found = [_waits(report, Place.CRITICAL)]
    if report.simulated:
        return (*found, _waits(report, Place.OVERLAPPED), _waits(report, Place.HIDDEN))
    lost = report.waiting_ms(Place.CRITICAL)
    found.append(Figure("lost in critical waits", "ms a step", lost, number(lost)))
    if gpu := report.gpu:
        gaps = f"gaps of 3 µs and more; {number(gpu.host_gaps_per_step)} a step"
        found.append(Figure("host-caused idle", _SHARE, gpu.host_idle, percent(gpu.host_idle), gaps))
        short = "gaps under 3 µs, between launched kernels"
        found.append(Figure("launch gaps", _SHARE, gpu.launch_gaps, percent(gpu.launch_gaps), short))
        kernels = f"{gpu.kernels_per_step:.0f} kernels a step"
        found.append(Figure("device busy", _SHARE, gpu.busy, percent(gpu.busy), kernels))
    step = report.step_ms
    found.append(Figure("step time", "ms, median", step.median, number(step.median), _tails(step)))
    return tuple(found)


def compared_figures(before: Report, after: Report) -> tuple[tuple[Figure, Figure], ...]:
    """The key figures that both reports have."""
    old = {figure.name: figure for figure in key_figures(before)}
    return tuple((old[figure.name], figure) for figure in key_figures(after) if figure.name in old)


def is_timed(*reports: Report | None) -> bool:
    """Whether times of these reports mean something: none is simulated."""
    return not any(report.simulated for report in reports if report)


def paired_causes(before: Report | None, after: Report) -> tuple[Pair[Cause], ...]:
    """The causes of both reports in pairs, the worst first; without a report of before, in the report's order.

    Two causes are the same if their kind, place, thread and site are equal.
    """
    left: dict[tuple[str, ...], list[Cause]] = {}
    for cause in before.causes if before else ():
        left.setdefault(_identity(cause), []).append(cause)
    pairs: list[Pair[Cause]] = []
    for cause in after.causes:
        same = left.get(_identity(cause))
        pairs.append(Pair(same.pop(0) if same else None, cause))
    pairs += [Pair(cause, None) for causes in left.values() for cause in causes]
    return tuple(sorted(pairs, key=_weight) if before else pairs)


def paired_phases(before: Report | None, after: Report) -> tuple[Pair[PhaseTime], ...]:
    """The phases of both reports in pairs, in the order of after; phases that only before has come last."""
    left = {(time.thread, time.phase): time for time in before.phases} if before else {}
    pairs = [Pair(left.pop((time.thread, time.phase), None), time) for time in after.phases]
    return (*pairs, *(Pair(time, None) for time in left.values()))


def phase_fields(pairs: Sequence[Pair[PhaseTime]]) -> tuple[str, ...]:
    """The figures of `PhaseTime` that a table shows: the longest step only where a report has it."""
    shown = ("ms_per_step", "waiting_ms_per_step")
    longest = any(time and time.longest_step_ms for pair in pairs for time in pair.all(compared=True))
    return (*shown, "longest_step_ms") if longest else shown


def facts(report: Report) -> dict[str, str]:
    """Facts of the engine and its load, by name, without those that are empty."""
    engine, load = report.engine, report.load
    scheduling = "asynchronous" if engine.async_scheduling else "synchronous"
    found = {
        "vLLM": engine.vllm,
        "device": engine.device,
        "model": engine.model,
        "runner": _joined(engine.runner, *engine.backends, *engine.builders),
        "scheduling": f"{scheduling}: {engine.decided_by}",
        "speculation": engine.speculation,
        "CUDA graphs": engine.graphs,
        "plugin": engine.plugin,
        "processes": engine.processes,
        "load": f"{load.name}; {load.requests} requests at once",
        "output": _joined(*_output(report)),
        "recorded": f"{report.steps} steps, {report.date}",
        "software": _joined(f"PyTorch {engine.torch}", f"Python {engine.python}", engine.driver),
    }
    return {name: fact for name, fact in found.items() if fact}


def page_facts(report: Report, before: Report | None) -> dict[str, tuple[str, str]]:
    """Facts by name, each with that of before where another; without those in the page's first line."""
    old = facts(before) if before else {}
    shown = {name: (fact, was if (was := old.get(name, fact)) != fact else "") for name, fact in facts(report).items()}
    return {name: pair for name, pair in shown.items() if name not in _FIRST_LINE or pair[1]}


def recording_cost(report: Report) -> str:
    """What recording did to the step time."""
    if report.simulated:
        return "The cost of recording is omitted, because on a CPU it says nothing about a GPU."
    if report.overhead is None:
        return "The cost of recording was not measured."
    cost = report.overhead
    return (
        f"In one engine with the same load, a step took {_spread(cost.plain_ms)} without recording. With the GPU's own "
        f"records, a step took {_spread(cost.device_ms)}, {number(cost.device_ratio)} times as long; this recording "
        f"gives the GPU's shares of time. With call stacks and phases too, a step took {_spread(cost.recorded_ms)}, "
        f"{number(cost.ratio)} times as long; this recording gives the other figures."
    )


def notes(report: Report, before: Report | None) -> tuple[str, ...]:
    """What a reader must know to trust the figures; a note that both reports have comes once."""
    found = [recording_cost(report), *report.notes]
    old = [recording_cost(before), *before.notes] if before else []
    return (*found, *(f"Before: {note}" for note in old if note not in found))


def number(value: float) -> str:
    """Two decimals; zero only for zero."""
    return "0" if value == 0 else "<0.01" if 0 < value < 0.005 else f"{value:.2f}"


def percent(share: float) -> str:
    """A share of one as per cent, without the sign."""
    return "0" if share == 0 else "<0.1" if 0 < share < 0.0005 else f"{100 * share:.1f}"


def ratio(before: float, after: float) -> str:
    """`after / before`, or `-` if that is undefined."""
    if not before or not math.isfinite(after / before):
        return "-"
    return number(after / before)


def _waits(report: Report, place: Place) -> Figure:
    name = f"{place.value} waits, if on a GPU" if report.simulated else f"{place.value} waits"
    return Figure(name, "a step", report.waits(place), number(report.waits(place)))


def _spread(sample: Spread) -> str:
    return f"{number(sample.median)} ms ({_tails(sample)})"


def _tails(sample: Spread) -> str:
    return f"p10-p90 {number(sample.p10)}-{number(sample.p90)}, n = {sample.n}"


def _identity(cause: Cause) -> tuple[str, ...]:
    return cause.kind.value, cause.place.value, cause.thread, str(cause.site)


def _weight(pair: Pair[Cause]) -> tuple[float, ...]:
    causes = [cause for cause in (pair.before, pair.after) if cause]
    place = list(Place).index(pair.either.place)
    return place, -max(cause.ms_per_step for cause in causes), -max(cause.per_step for cause in causes)


def _output(report: Report) -> Iterator[str]:
    load = report.load
    if load.tokens_per_second is not None and not report.simulated:
        yield f"{load.tokens_per_second:.0f} tokens/s"
    if load.acceptance_length is not None:
        yield f"{number(load.acceptance_length)} tokens a step and request"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
