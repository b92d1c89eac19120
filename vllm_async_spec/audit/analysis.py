"""From what was recorded to what is reported."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_async_spec.audit.device_trace import DeviceTrace, Times, read_trace
from vllm_async_spec.audit.report import (
    Cause,
    DeviceTime,
    Frame,
    Gap,
    Phase,
    PhaseTime,
    Place,
    Spread,
    Timeline,
    WaitKind,
)
from vllm_async_spec.audit.spans import Span
from vllm_async_spec.audit.stack import readable
from vllm_async_spec.audit.timeline import draw
from vllm_async_spec.audit.waits import Wait, waits_on_cpu, waits_on_gpu

LAUNCH_GAP_NS = 3_000
"""A gap shorter than this is between kernels that are already launched; a longer one is the host's, or a dependency."""
SETTLING = 2
"""Steps at the start of a recording that are not counted: the profiler has just started."""
_GAPS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Findings:
    """The parts of a report that a recording alone gives."""

    steps: int
    step_ms: Spread
    simulated: bool
    causes: tuple[Cause, ...]
    phases: tuple[PhaseTime, ...]
    gpu: DeviceTime | None
    timeline: Timeline | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Everything of one recording, on one clock."""

    steps: tuple[int, ...]
    main: int
    threads: dict[int, str]
    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]
    trace: DeviceTrace | None
    simulated: bool

    @property
    def start(self) -> int:
        """Where the counted steps start."""
        return self.steps[0]

    @property
    def end(self) -> int:
        """Where they end."""
        return self.steps[-1]

    def name_of(self, thread: int) -> str:
        """What a report calls a thread."""
        return "worker" if thread == self.main else self.threads.get(thread, f"thread {thread}")


def load(files: dict[str, str], core: dict[str, str] | None = None) -> Recorded:
    """Read what a worker's recorder saved, and the engine core's where that is another process.

    Raises:
        ValueError: the recording has fewer steps than are needed to say anything.
    """
    data = json.loads(Path(files["recording"]).read_text(encoding="utf-8"))
    steps = data["steps"][SETTLING:]
    if len(steps) < 2:
        raise ValueError(
            f"only {max(len(data['steps']) - 1, 0)} steps were recorded, of which the first {SETTLING} are left out; "
            "give the engine a longer load, or ask for fewer steps to skip"
        )
    threads = {int(ident): name for ident, name in data["threads"].items()}
    trace = read_trace(Path(files["trace"])) if "trace" in files else None
    if trace is None:
        waits = waits_on_cpu(data["reads"], data["thread"])
    else:
        waits = waits_on_gpu(data["calls"], trace, list(threads), data["thread"])
    spans = [Span(**(span | {"phase": Phase(span["phase"])})) for span in data["spans"]]
    if core is not None:
        other = json.loads(Path(core["recording"]).read_text(encoding="utf-8"))
        # Identifiers of threads are a process's own; a negative one is nobody's.
        threads[-1] = "engine core"
        spans += [Span(**(span | {"phase": Phase(span["phase"]), "thread": -1})) for span in other["spans"]]
    start, end = steps[0], steps[-1]
    return Recorded(
        steps=tuple(steps),
        main=data["thread"],
        threads=threads,
        spans=tuple(sorted((s for s in spans if s.end > start and s.start < end), key=lambda s: (s.start, -s.end))),
        waits=tuple(wait for wait in waits if start <= wait.start < end),
        trace=trace,
        simulated=data["simulated"],
    )


def analyse(recorded: Recorded) -> Findings:
    """Say what a recording shows."""
    steps = len(recorded.steps) - 1
    causes, unseen = _causes(recorded, steps)
    notes = []
    if unseen:
        notes.append(
            f"{unseen / steps:.2f} waits a step were timed by CUPTI and asked for by no Python call that was seen (a "
            "library's own); for them the function around them is given."
        )
    if recorded.simulated:
        notes.append(
            "There is no GPU: waits are the reads that would be waits on one, found by following what the forward "
            "computed through every operator. Following makes every step many times slower, so no time is given."
        )
    return Findings(
        steps=steps,
        step_ms=spread([ms(b - a) for a, b in itertools.pairwise(recorded.steps)]),
        simulated=recorded.simulated,
        causes=causes,
        phases=() if recorded.simulated else _phases(recorded, steps),
        gpu=None if recorded.trace is None else _device_time(recorded, recorded.trace, steps),
        timeline=None if recorded.simulated else draw(recorded),
        notes=tuple(notes),
    )


def ms(nanoseconds: float) -> float:
    """Nanoseconds in milliseconds."""
    return float(nanoseconds) / 1e6


def spread(values: Sequence[float]) -> Spread:
    """The spread of a sample that is not empty."""
    return Spread(len(values), *(float(np.percentile(values, q)) for q in (50, 10, 90)))


def _causes(recorded: Recorded, steps: int) -> tuple[tuple[Cause, ...], int]:
    """Waits by who asked, and how many nobody was seen asking for."""
    inside = Innermost(recorded.spans)
    found: dict[tuple[object, ...], list[Wait]] = defaultdict(list)
    about: dict[tuple[object, ...], tuple[WaitKind, Place, str, Phase, tuple[Frame, ...]]] = {}
    unseen = 0
    for wait in recorded.waits:
        span = inside(wait.thread, wait.start)
        stack = readable(wait.stack)
        if not stack and span is not None:
            unseen += 1
            stack = readable(((span.file, span.line, span.name),))
        site = (stack[0].file, stack[0].line, stack[0].function) if stack else ()
        phase = span.phase if span is not None else Phase.OTHER
        key = (wait.kind, wait.place, wait.thread, site)
        found[key].append(wait)
        about.setdefault(key, (wait.kind, wait.place, recorded.name_of(wait.thread), phase, stack))
    causes = [
        Cause(
            *about[key],
            per_step=len(waits) / steps,
            ms_per_step=ms(sum(wait.end - wait.start for wait in waits)) / steps,
            longest_ms=ms(max(wait.end - wait.start for wait in waits)),
        )
        for key, waits in found.items()
    ]
    order = list(Place)
    causes.sort(key=lambda cause: (order.index(cause.place), -cause.ms_per_step, -cause.per_step))
    return tuple(causes), unseen


class Innermost:
    """Which watched function a thread was in at a moment."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._by_thread: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            self._by_thread[span.thread].append(span)
        self._starts = {t: np.array([s.start for s in mine]) for t, mine in self._by_thread.items()}

    def __call__(self, thread: int, moment: int) -> Span | None:
        """The innermost span around `moment`, or None."""
        if thread not in self._by_thread:
            return None
        mine = self._by_thread[thread]
        # Spans of a thread nest, so the innermost is the last to have started among those that have not ended.
        for index in range(int(np.searchsorted(self._starts[thread], moment, side="right")) - 1, -1, -1):
            if mine[index].end >= moment:
                return mine[index]
            if moment - mine[index].start > 10_000_000_000:
                break
        return None


def own_times(recorded: Recorded) -> list[tuple[Span, int, list[tuple[int, int]]]]:
    """Each span with the stretches that are its own: neither another watched function's nor outside the recording."""
    found = []
    by_thread: dict[int, list[Span]] = defaultdict(list)
    for span in recorded.spans:
        by_thread[span.thread].append(span)
    for spans in by_thread.values():
        open_spans: list[tuple[Span, list[tuple[int, int]], list[int]]] = []

        def close(until: int, open_spans: list[Any] = open_spans) -> None:
            while open_spans and open_spans[-1][0].end <= until:
                span, own, cursor = open_spans.pop()
                own.append((cursor[0], span.end))
                found.append((span, span.thread, _clip(own, recorded.start, recorded.end)))
                if open_spans:
                    open_spans[-1][2][0] = span.end

        for span in spans:
            close(span.start)
            if open_spans:
                _, own, cursor = open_spans[-1]
                own.append((cursor[0], span.start))
            open_spans.append((span, [], [span.start]))
        close(max(span.end for span in spans))
    return found


def _clip(stretches: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    clipped = [(max(a, start), min(b, end)) for a, b in stretches]
    return [(a, b) for a, b in clipped if b > a]


def overlap(stretches: Sequence[tuple[int, int]], start: int, end: int) -> int:
    """Nanoseconds that the stretches have in common with one more."""
    return sum(max(min(b, end) - max(a, start), 0) for a, b in stretches)


def _phases(recorded: Recorded, steps: int) -> tuple[PhaseTime, ...]:
    total: Counter[tuple[int, Phase]] = Counter()
    waiting: Counter[tuple[int, Phase]] = Counter()
    inside = Innermost(recorded.spans)
    for span, thread, own in own_times(recorded):
        total[thread, span.phase] += sum(b - a for a, b in own)
    for wait in recorded.waits:
        around = inside(wait.thread, wait.start)
        if around is not None:
            waiting[wait.thread, around.phase] += wait.end - wait.start
    order = list(Phase)
    return tuple(
        PhaseTime(phase, recorded.name_of(thread), ms(total[thread, phase]) / steps, ms(waiting[thread, phase]) / steps)
        for thread, phase in sorted(total, key=lambda key: (key[0] != recorded.main, order.index(key[1])))
        if total[thread, phase]
    )


def device_gaps(trace: DeviceTrace, start: int, end: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Busy nanoseconds between two moments, and the gaps: start, end, and the index of the work that ended it or -1."""
    busy, gaps, cursor = 0, [], start
    first = int(np.searchsorted(trace.end, start))
    for index in range(first, len(trace.start)):
        a, b = max(int(trace.start[index]), start), min(int(trace.end[index]), end)
        if a >= end:
            break
        if b <= a:
            continue
        if a > cursor:
            gaps.append((cursor, a, index))
        busy += max(b - max(a, cursor), 0)
        cursor = max(cursor, b)
    if cursor < end:
        gaps.append((cursor, end, -1))
    return busy, gaps


def _device_time(recorded: Recorded, trace: DeviceTrace, steps: int) -> DeviceTime:
    start, end = recorded.start, recorded.end
    busy, gaps = device_gaps(trace, start, end)
    long = [gap for gap in gaps if gap[1] - gap[0] >= LAUNCH_GAP_NS]
    idle = sum(b - a for a, b, _ in long)
    whole = end - start
    meanwhile = Meanwhile(recorded)
    longest = sorted(long, key=lambda gap: gap[0] - gap[1])[:_GAPS_SHOWN]
    kernels = int(((trace.start >= start) & (trace.start < end) & ~trace.is_copy).sum())
    return DeviceTime(
        busy=busy / whole,
        launch_gaps=(whole - busy - idle) / whole,
        host_idle=idle / whole,
        kernels_per_step=kernels / steps,
        host_gaps_per_step=len(long) / steps,
        gaps=tuple(
            Gap((a - start) / 1e3, (b - a) / 1e3, meanwhile(a, b, None if index < 0 else int(trace.launched[index])))
            for a, b, index in longest
        ),
    )


class Meanwhile:
    """What the launching thread did in some stretch of time, in words."""

    def __init__(self, recorded: Recorded) -> None:
        self._own = [(span, own) for span, thread, own in own_times(recorded) if thread == recorded.main]
        self._waits = [wait for wait in recorded.waits if wait.thread == recorded.main]

    def __call__(self, start: int, end: int, launched: int | None) -> str:
        """Say it of the gap from `start` to `end`, which ended with work that was launched at `launched`."""
        if launched is not None and launched < start:
            return "nothing was left to launch: a dependency between streams, or within a graph"
        until = max(min(launched or end, end), start + 1)
        did: Counter[str] = Counter()
        for wait in self._waits:
            if wait.start < until and wait.end > start:
                site = next(iter(readable(wait.stack, depth=1)), None)
                name = f"waiting at {site.file}:{site.line}" if site else f"waiting ({wait.kind.value})"
                did[name] += min(wait.end, until) - max(wait.start, start)
        waited = did.total()
        for span, own in self._own:
            took = overlap(own, start, until)
            if took:
                took -= sum(overlap(own, max(w.start, start), min(w.end, until)) for w in self._waits)
                did[f"{span.phase.value} ({span.name.rpartition('.')[2]})"] += max(took, 0)
        rest = until - start - did.total()
        if rest > 0:
            did["outside any watched function"] += rest
        del waited
        whole = did.total() or 1
        return ", ".join(f"{name} {took / whole:.0%}" for name, took in did.most_common(3) if took / whole >= 0.05)


__all__ = ["Findings", "Recorded", "Times", "analyse", "load"]
