"""Join the waits that CUPTI timed with the Python lines that asked for them."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_async_spec.audit.device_trace import DeviceTrace, Runtime, cupti_thread
from vllm_async_spec.audit.report import Place, WaitKind
from vllm_async_spec.audit.stack import Stack, readable

INSTANT_NS = 25_000
"""A shorter event wait or non-blocking copy delays nothing: the event had already happened, or the driver buffered the
copy."""
_ADJACENT_NS = 100_000


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of one thread; nanoseconds since the epoch."""

    thread: int
    kind: WaitKind
    place: Place
    start: int
    end: int
    stack: Stack
    """Empty where no Python call was seen."""
    resumed: int
    """When Python went on; later than `end` if another thread held Python's lock."""


def waits_on_gpu(calls: Sequence[dict[str, Any]], trace: DeviceTrace, threads: Sequence[int], main: int) -> list[Wait]:
    """Every wait in `trace`, by start, with the Python stack that asked for it.

    Args:
        calls: `cuda_waits.Call`s as data.
        trace: CUPTI's records.
        threads: Python's identifiers of the threads.
        main: the thread that launches the forward.
    """
    busy_until = _BusyUntil(trace)
    ident = {cupti_thread(thread): thread for thread in threads}
    by_thread: dict[int, list[Runtime]] = defaultdict(list)
    for runtime in trace.blocking:
        by_thread[ident.get(runtime.thread, runtime.thread)].append(runtime)
    noted: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        noted[call["thread"]].append(call)
    waits = []
    for thread, runtimes in by_thread.items():
        for group, stack, resumed in _groups(runtimes, noted[thread]):
            kind = _kind(group, stack)
            if kind is not None:
                place = _place(kind, group, thread == main, busy_until)
                waits.append(Wait(thread, kind, place, group[0].start, group[-1].end, stack, resumed))
    return sorted(waits, key=lambda wait: wait.start)


def _groups(runtimes: list[Runtime], calls: list[dict[str, Any]]) -> list[tuple[list[Runtime], Stack, int]]:
    """Runtime calls grouped by wait, each group with the stack of its Python call and the time when Python went on.

    A noted call made the runtime calls between its start and end. Outer calls go first, since a blocking `.to` is a
    noted copy with a warning inside. A warning comes just after its wait.
    """
    left = list(runtimes)
    groups: list[tuple[list[Runtime], Stack, int]] = []
    for call in sorted((c for c in calls if c["what"] != "warning"), key=lambda c: (c["start"], -c["end"])):
        inside = [r for r in left if call["start"] <= r.start and r.end <= call["end"]]
        if inside:
            left = [r for r in left if r not in inside]
            groups.append((inside, call["stack"], call["end"]))
    for call in sorted((c for c in calls if c["what"] == "warning"), key=lambda c: c["start"]):
        before = [r for r in left if r.end <= call["start"]]
        if not before:
            continue
        group = [before[-1]]
        if len(before) > 1 and before[-2].copy and group[0].start - before[-2].end < _ADJACENT_NS:
            group.insert(0, before[-2])
        left = [r for r in left if r not in group]
        groups.append((group, call["stack"], call["end"]))
    # The rest are libraries' own. A copy of pinned memory without a synchronising call is no wait.
    groups += [([r], (), r.end) for r in left if not r.copy.endswith("Pinned")]
    return groups


_READ = re.compile(r"\.item\(|\.tolist\(|nonzero|\.any\(|\.all\(|\bbool\(|\bint\(|\bfloat\(")


def _kind(group: list[Runtime], stack: Stack) -> WaitKind | None:
    """The kind of wait of a group; None if it is no wait."""
    copy = next((r for r in group if r.copy), None)
    names = [r.name for r in group if not r.copy]
    if any("EventSynchronize" in name for name in names):
        return WaitKind.EVENT
    if any("DeviceSynchronize" in name or "Ctx" in name or "Free" in name for name in names):
        return WaitKind.DEVICE
    if copy is None:
        return WaitKind.STREAM
    if not names:  # no synchronising call
        return WaitKind.PAGEABLE if copy.copy.endswith("Pageable") else None
    if copy.copy.startswith("HtoD"):
        return WaitKind.COPY_TO_DEVICE
    # PyTorch copies a value for a Python object alone, through a pinned word of its own.
    alone = copy.copy == "DtoH Pinned" and copy.bytes <= 8
    reads = alone or any(_READ.search(frame.source) for frame in readable(stack, depth=1))
    return WaitKind.READ if reads else WaitKind.COPY_TO_HOST


def _place(kind: WaitKind, group: list[Runtime], launches: bool, busy_until: _BusyUntil) -> Place:
    if not launches:
        return Place.HIDDEN
    took = group[-1].end - group[0].start
    if kind in (WaitKind.EVENT, WaitKind.PAGEABLE) and took < INSTANT_NS:
        return Place.OVERLAPPED
    return Place.OVERLAPPED if busy_until(group[-1].end) else Place.CRITICAL


class _BusyUntil:
    """Whether, at a moment, the device still had work launched before."""

    _SLACK_NS = 2_000

    def __init__(self, trace: DeviceTrace) -> None:
        order = np.argsort(trace.launched, kind="stable")
        self._launched = trace.launched[order].tolist()
        self._end = np.maximum.accumulate(trace.end[order]).tolist() if len(order) else []

    def __call__(self, moment: int) -> bool:
        launched = bisect.bisect_left(self._launched, moment)
        return launched > 0 and bool(self._end[launched - 1] > moment + self._SLACK_NS)


def waits_on_cpu(reads: Sequence[dict[str, Any]], main: int) -> list[Wait]:
    """The reads of a CPU engine that would be waits on a GPU: waits of no length, at the moment of the read."""
    return [
        Wait(
            read["thread"],
            _CPU_KINDS.get(read["what"], WaitKind.READ),
            Place.HIDDEN if read["thread"] != main else Place.OVERLAPPED if read["late"] else Place.CRITICAL,
            read["at"],
            read["at"],
            tuple(tuple(entry) for entry in read["stack"]),
            read["at"],
        )
        for read in reads
    ]


_CPU_KINDS = {
    "event": WaitKind.EVENT,
    "cpu": WaitKind.COPY_TO_HOST,
    "to": WaitKind.COPY_TO_HOST,
    "numpy": WaitKind.COPY_TO_HOST,
}
"""By operation; every other operation reads a value or a shape."""
