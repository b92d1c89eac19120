"""A few steps from the middle of a recording, as lanes of blocks."""

from __future__ import annotations

import numpy as np

from vllm_async_spec.audit.device_time import LAUNCH_GAP_NS, gaps_between
from vllm_async_spec.audit.device_trace import DeviceTrace
from vllm_async_spec.audit.recorded import Recorded
from vllm_async_spec.audit.report import Item, Lane, Place, Timeline, asking
from vllm_async_spec.audit.stack import readable

_STEPS = 4
_JOIN_NS = 3_000
"""Work that follows other work of its stream within this time is drawn in the same block."""
_SHORTEST_NS = 1_000
"""Shorter phases are not drawn."""
_LONGEST_NAME = 60
"""Characters of a kernel's name that a block keeps."""


def draw(recorded: Recorded) -> Timeline:
    """The timeline of the steps in the middle."""
    steps = recorded.steps
    shown = min(_STEPS, len(steps) - 1)
    first = (len(steps) - 1 - shown) // 2
    start, end = steps[first], steps[first + shown]
    lanes = _host_lanes(recorded, start, end)
    if recorded.trace is not None:
        lanes += _device_lanes(recorded.trace, start, end)
    return Timeline(
        us=(end - start) / 1e3,
        steps_us=tuple((step - start) / 1e3 for step in steps[first : first + shown]),
        lanes=tuple(lanes),
    )


def _host_lanes(recorded: Recorded, start: int, end: int) -> list[Lane]:
    items: dict[int, list[Item]] = {recorded.main: []}
    for span in recorded.spans:
        a, b = max(span.start, start), min(span.end, end)
        if b - a >= _SHORTEST_NS:
            where = readable(((span.file, span.line, span.name),), depth=1)
            items.setdefault(span.thread, []).append(
                _item(a, b, start, span.phase.value, span.name.rpartition(".")[2], str(where[0]) if where else "")
            )
    for wait in recorded.waits:
        a, b = max(wait.start, start), min(wait.end, end)
        if b > a:
            site = asking(readable(wait.stack))
            item = _item(a, b, start, "wait", wait.kind.value, str(site) if site else "", wait.place is Place.CRITICAL)
            items.setdefault(wait.thread, []).append(item)
    return [
        Lane(recorded.name_of(thread), False, tuple(sorted(mine, key=lambda item: (item.start_us, -item.us))))
        for thread, mine in items.items()
    ]


def _item(a: int, b: int, start: int, kind: str, label: str, where: str = "", critical: bool = False) -> Item:
    return Item((a - start) / 1e3, (b - a) / 1e3, kind, label, where, critical)


def _device_lanes(trace: DeviceTrace, start: int, end: int) -> list[Lane]:
    shown = (trace.end > start) & (trace.start < end)
    streams, counts = np.unique(trace.stream[shown], return_counts=True)
    lanes = []
    for stream in streams[np.argsort(-counts)]:
        chosen = np.flatnonzero(shown & (trace.stream == stream))
        lanes.append(Lane(f"GPU stream {int(stream)}", True, tuple(_blocks(trace, chosen.tolist(), start, end))))
    if lanes:
        gaps = [
            _item(a, b, start, "gap", "idle") for a, b, _ in gaps_between(trace, start, end) if b - a >= LAUNCH_GAP_NS
        ]
        busiest = lanes[0]
        # These gaps are the whole device's, so all streams idle in them; they are shown on the busiest stream.
        items = sorted([*busiest.items, *gaps], key=lambda item: item.start_us)
        lanes[0] = Lane(busiest.name, True, tuple(items))
    return lanes


def _kernel(name: str) -> str:
    """The beginning of a kernel's name: with its template arguments it can have over a thousand characters."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"


def _blocks(trace: DeviceTrace, chosen: list[int], start: int, end: int) -> list[Item]:
    items, group = [], chosen[:1]
    for index in [*chosen[1:], -1]:
        if index >= 0 and trace.start[index] - trace.end[group[-1]] < _JOIN_NS:
            group.append(index)
            continue
        a, b = max(int(trace.start[group[0]]), start), min(int(trace.end[group[-1]]), end)
        copies = all(trace.is_copy[i] for i in group)
        several = f"{len(group)} {'copies' if copies else 'kernels'}"
        label = several if len(group) > 1 else _kernel(trace.names[group[0]])
        items.append(_item(a, b, start, "copy" if copies else "kernels", label))
        group = [index]
    return items
