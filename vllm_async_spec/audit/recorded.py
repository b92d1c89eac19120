"""Read a saved recording back; all times are nanoseconds since the epoch."""

from __future__ import annotations

import bisect
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_async_spec.audit.device_trace import DeviceTrace, read_trace
from vllm_async_spec.audit.report import Phase, Spread
from vllm_async_spec.audit.spans import Span
from vllm_async_spec.audit.waits import Wait, waits_on_cpu, waits_on_gpu

SETTLING = 2
"""Steps at the start of a recording that are not counted: the profiler has just started."""
ENGINE_CORE = -1
"""Stands for the engine core's thread in another process, whose thread identifiers mean nothing here."""

Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one recording holds of its counted steps."""

    steps: tuple[int, ...]
    """When each step started, and when the last ended."""
    main: int
    """The thread that launches the forward."""
    threads: dict[int, str]
    spans: tuple[Span, ...]
    """By start; spans of one thread nest."""
    waits: tuple[Wait, ...]
    """By start."""
    trace: DeviceTrace | None
    simulated: bool

    @property
    def start(self) -> int:
        """Start of the counted steps."""
        return self.steps[0]

    @property
    def end(self) -> int:
        """End of the counted steps."""
        return self.steps[-1]

    @property
    def count(self) -> int:
        """Number of counted steps."""
        return len(self.steps) - 1

    @property
    def step_ms(self) -> Spread:
        """Step times in milliseconds."""
        return spread([ms(b - a) for a, b in itertools.pairwise(self.steps)])

    def name_of(self, thread: int) -> str:
        """A thread's name in reports."""
        return "worker" if thread == self.main else self.threads.get(thread, f"thread {thread}")


def load(files: dict[str, str], core: dict[str, str] | None = None) -> Recorded:
    """Read what a worker's recorder saved, and the engine core's if that is another process.

    Raises:
        ValueError: the recording has too few steps.
    """
    data = _json(files)
    steps = data["steps"][SETTLING:]
    if len(steps) < 2:
        raise ValueError(
            f"only {max(len(data['steps']) - 1, 0)} steps were recorded, of which the first {SETTLING} are left out; "
            "give the engine a longer load"
        )
    main = data["thread"]
    threads = {int(ident): name for ident, name in data["threads"].items()}
    trace = read_trace(Path(files["trace"])) if "trace" in files else None
    if trace is None:
        waits = waits_on_cpu(data["reads"], main)
    else:
        waits = waits_on_gpu(data["calls"], trace, list(threads), main)
    spans = [_span(span) for span in data["spans"]]
    if core is not None:
        threads[ENGINE_CORE] = "engine core"
        spans += [_span(span | {"thread": ENGINE_CORE}) for span in _json(core)["spans"]]
    start, end = steps[0], steps[-1]
    return Recorded(
        steps=tuple(steps),
        main=main,
        threads=threads,
        spans=tuple(sorted((s for s in spans if s.end > start and s.start < end), key=lambda s: (s.start, -s.end))),
        waits=tuple(wait for wait in waits if start <= wait.start < end),
        trace=trace,
        simulated=data["simulated"],
    )


def _json(files: dict[str, str]) -> Any:
    return json.loads(Path(files["recording"]).read_text(encoding="utf-8"))


def _span(data: dict[str, Any]) -> Span:
    return Span(**(data | {"phase": Phase(data["phase"])}))


def ms(nanoseconds: float) -> float:
    """Nanoseconds in milliseconds."""
    return float(nanoseconds) / 1e6


def spread(values: Sequence[float]) -> Spread:
    """The spread of a sample that is not empty."""
    return Spread(len(values), *(float(np.percentile(values, q)) for q in (50, 10, 90)))


@dataclass(frozen=True, slots=True)
class Own:
    """A span, and the stretches of time in which its thread was in the span but in no inner span."""

    span: Span
    stretches: tuple[Stretch, ...]

    def within(self, start: int, end: int) -> int:
        """Nanoseconds of the stretches between two moments."""
        return sum(took for _, took in self.by_step((start, end)))

    def by_step(self, steps: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Indices of the steps that the stretches are in, and nanoseconds in each.

        Args:
            steps: when each step starts, and when the last ends.
        """
        for begin, end in self.stretches:
            for step in range(max(bisect.bisect_right(steps, begin) - 1, 0), len(steps) - 1):
                if steps[step] >= end:
                    break
                yield step, min(end, steps[step + 1]) - max(begin, steps[step])


def own_times(recorded: Recorded) -> list[Own]:
    """Every span with its own stretches."""
    inner: dict[Span, list[Span]] = defaultdict(list)
    around: dict[int, list[Span]] = defaultdict(list)
    for span in recorded.spans:
        stack = around[span.thread]
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack:
            inner[stack[-1]].append(span)
        stack.append(span)
    return [Own(span, tuple(_between(span, inner[span]))) for span in recorded.spans]


def _between(span: Span, inner: Sequence[Span]) -> list[Stretch]:
    """The stretches of a span outside its direct inner spans, which follow each other."""
    edges = [span.start, *itertools.chain.from_iterable((one.start, one.end) for one in inner), span.end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


class Innermost:
    """Finds the watched function that a thread was in at a moment."""

    def __init__(self, recorded: Recorded) -> None:
        self._spans: dict[int, list[Span]] = defaultdict(list)
        for span in recorded.spans:
            self._spans[span.thread].append(span)
        self._starts = {thread: [span.start for span in spans] for thread, spans in self._spans.items()}

    def __call__(self, thread: int, moment: int) -> Span | None:
        """The innermost span around `moment`, or None."""
        spans = self._spans.get(thread, [])
        # Spans nest, so the innermost is the last started that has not ended; a step has a few dozen spans.
        last = int(np.searchsorted(self._starts.get(thread, []), moment, side="right"))
        return next((span for span in reversed(spans[max(last - 200, 0) : last]) if span.end >= moment), None)
