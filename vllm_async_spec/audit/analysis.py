"""Turn recordings into the findings of a report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_async_spec.audit.device_time import device_time
from vllm_async_spec.audit.recorded import Innermost, Recorded, ms, own_times
from vllm_async_spec.audit.report import Cause, DeviceTime, Frame, Phase, PhaseTime, Place, Timeline, WaitKind, asking
from vllm_async_spec.audit.stack import readable
from vllm_async_spec.audit.timeline import draw
from vllm_async_spec.audit.waits import Wait


@dataclass(frozen=True, slots=True)
class Findings:
    """The parts of a report that come from the recordings alone."""

    steps: int
    simulated: bool
    causes: tuple[Cause, ...]
    phases: tuple[PhaseTime, ...]
    gpu: DeviceTime | None
    timeline: Timeline | None
    notes: tuple[str, ...]


def analyse(full: Recorded, quiet: Recorded | None) -> Findings:
    """Analyse recordings of the same load: `full` with phases and waits, `quiet` by CUPTI alone, None without a GPU."""
    causes, unseen = _causes(full)
    return Findings(
        steps=full.count,
        simulated=full.simulated,
        causes=causes,
        phases=() if full.simulated else _phases(full),
        gpu=None if quiet is None else device_time(quiet, full),
        timeline=None if full.simulated else draw(full),
        notes=tuple(_notes(full, unseen)),
    )


_LOCK_MS = 0.02
"""Milliseconds a step lost to Python's lock after waits; a larger loss gets a note."""


def _notes(recorded: Recorded, unseen: int) -> Iterator[str]:
    if recorded.simulated:
        yield (
            "There is no GPU, so the report counts reads that would wait on a GPU. The audit follows the forward's "
            "results through every operator. This makes every step many times slower, so the report gives no times."
        )
    if unseen:
        yield (
            f"CUPTI timed {unseen / recorded.count:.2f} waits a step without a Python caller, such as those of a C++ "
            "library. For these waits the report names the watched function around the wait."
        )
    after = ms(sum(w.resumed - w.end for w in recorded.waits if w.thread == recorded.main)) / recorded.count
    if after > _LOCK_MS:
        yield (
            f"After its waits the launching thread lost another {after:.2f} ms a step before Python went on, because "
            "another thread held Python's lock. That is in no wait's time."
        )


def _causes(recorded: Recorded) -> tuple[tuple[Cause, ...], int]:
    """Waits grouped by the line that asked, and the number of waits without a Python call."""
    inside = Innermost(recorded)
    found: dict[tuple[object, ...], list[Wait]] = defaultdict(list)
    about: dict[tuple[object, ...], tuple[WaitKind, Place, str, Phase, tuple[Frame, ...]]] = {}
    unseen = 0
    for wait in recorded.waits:
        span = inside(wait.thread, wait.start)
        stack = readable(wait.stack)
        if not stack:
            unseen += 1
            stack = readable(((span.file, span.line, span.name),)) if span is not None else ()
        key = (wait.kind, wait.place, wait.thread, asking(stack))
        found[key].append(wait)
        phase = span.phase if span is not None else Phase.OTHER
        about.setdefault(key, (wait.kind, wait.place, recorded.name_of(wait.thread), phase, stack))
    causes = [
        Cause(
            *about[key],
            per_step=len(waits) / recorded.count,
            ms_per_step=ms(sum(wait.end - wait.start for wait in waits)) / recorded.count,
            longest_ms=ms(max(wait.end - wait.start for wait in waits)),
        )
        for key, waits in found.items()
    ]
    order = list(Place)
    causes.sort(key=lambda cause: (order.index(cause.place), -cause.ms_per_step, -cause.per_step))
    return tuple(causes), unseen


def _phases(recorded: Recorded) -> tuple[PhaseTime, ...]:
    in_step: defaultdict[tuple[int, Phase], Counter[int]] = defaultdict(Counter)
    waiting: Counter[tuple[int, Phase]] = Counter()
    for own in own_times(recorded):
        for step, took in own.by_step(recorded.steps):
            in_step[own.span.thread, own.span.phase][step] += took
    inside = Innermost(recorded)
    for wait in recorded.waits:
        span = inside(wait.thread, wait.start)
        if span is not None:
            waiting[wait.thread, span.phase] += wait.end - wait.start
    order = list(Phase)
    return tuple(
        PhaseTime(
            phase,
            recorded.name_of(thread),
            ms(in_step[thread, phase].total()) / recorded.count,
            ms(waiting[thread, phase]) / recorded.count,
            ms(max(in_step[thread, phase].values())),
        )
        for thread, phase in sorted(in_step, key=lambda key: (key[0] != recorded.main, order.index(key[1])))
    )
