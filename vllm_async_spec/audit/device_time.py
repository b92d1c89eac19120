"""How the device spent its time, and what the host did while it had nothing to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from vllm_async_spec.audit.device_trace import DeviceTrace
from vllm_async_spec.audit.recorded import Recorded, own_times
from vllm_async_spec.audit.report import DeviceTime, Gap, asking
from vllm_async_spec.audit.stack import readable

LAUNCH_GAP_NS = 3_000
"""Shorter gaps lie between kernels already launched; the host or a dependency causes longer gaps."""
_GAPS_SHOWN = 12


def gaps_between(trace: DeviceTrace, start: int, end: int) -> list[tuple[int, int, int]]:
    """Gaps of the device between two moments: start, end, and index of the work that ended the gap, or -1."""
    gaps, cursor = [], start
    for index in range(int(np.searchsorted(trace.start, end))):
        a, b = int(trace.start[index]), int(trace.end[index])
        if a > cursor:
            gaps.append((cursor, a, index))
        cursor = max(cursor, b)
    return [*gaps, (cursor, end, -1)] if cursor < end else gaps


@dataclass(frozen=True, slots=True)
class Shares:
    """How the device spent the time between two moments, in shares of that time."""

    busy: float
    """Share in which any work ran."""
    launch_gaps: float
    """Share in gaps shorter than 3 µs."""
    host_idle: float
    """Share in longer gaps."""
    host_gaps: int
    """Number of longer gaps."""


def shares_between(trace: DeviceTrace, start: int, end: int) -> Shares:
    """How the device spent the time between two moments."""
    gaps = [b - a for a, b, _ in gaps_between(trace, start, end)]
    long = [gap for gap in gaps if gap >= LAUNCH_GAP_NS]
    idle, host_idle, whole = sum(gaps), sum(long), end - start
    return Shares((whole - idle) / whole, (idle - host_idle) / whole, host_idle / whole, len(long))


def device_time(quiet: Recorded, full: Recorded) -> DeviceTime:
    """The shares of the device's time, from CUPTI's recording alone, and its longest gaps, from the full recording."""
    assert quiet.trace is not None
    trace = quiet.trace
    shares = shares_between(trace, quiet.start, quiet.end)
    kernels = (trace.start >= quiet.start) & (trace.start < quiet.end) & ~trace.is_copy
    return DeviceTime(
        busy=shares.busy,
        launch_gaps=shares.launch_gaps,
        host_idle=shares.host_idle,
        kernels_per_step=int(kernels.sum()) / quiet.count,
        host_gaps_per_step=shares.host_gaps / quiet.count,
        gaps=_longest(full),
    )


def _longest(full: Recorded) -> tuple[Gap, ...]:
    assert full.trace is not None
    meanwhile = _Meanwhile(full)
    gaps = [gap for gap in gaps_between(full.trace, full.start, full.end) if gap[1] - gap[0] >= LAUNCH_GAP_NS]
    longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:_GAPS_SHOWN]
    found = []
    for a, b, index in longest:
        launched = int(full.trace.launched[index]) if index >= 0 else b
        found.append(Gap((a - full.start) / 1e3, (b - a) / 1e3, meanwhile(a, b, launched)))
    return tuple(found)


class _Meanwhile:
    """What the launching thread did in a gap, in words."""

    def __init__(self, recorded: Recorded) -> None:
        self._own = [own for own in own_times(recorded) if own.span.thread == recorded.main]
        self._waits = [wait for wait in recorded.waits if wait.thread == recorded.main]

    def __call__(self, start: int, end: int, launched: int) -> str:
        """Describe the gap from `start` to `end`, which ended with work launched at `launched`."""
        if launched < start:
            return "nothing was left to launch: a dependency between streams, or within a graph"
        until = max(min(launched, end), start + 1)
        did: Counter[str] = Counter()
        waiting = [(max(w.start, start), min(w.resumed, until), w) for w in self._waits]
        waiting = [(a, b, wait) for a, b, wait in waiting if b > a]
        for a, b, wait in waiting:
            site = asking(readable(wait.stack))
            did[f"waiting at {site.file}:{site.line}" if site else f"waiting ({wait.kind.value})"] += b - a
        for own in self._own:
            if took := own.within(start, until):
                took -= sum(own.within(a, b) for a, b, _ in waiting)
                did[f"{own.span.phase.value} ({own.span.name.rpartition('.')[2]})"] += took
        did["outside any watched function"] += max(until - start - did.total(), 0)
        shares = [(name, took / (until - start)) for name, took in did.most_common(3)]
        return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.05)
