"""The timeline of a report in the trace event format, which Perfetto and chrome://tracing open.

It holds what the page's timeline shows, and no more: the steps in the middle of the recording. Each host thread has its
phases and waits, and each stream of the device its kernels and copies. Those closer than 3 µs are one block. Times are
microseconds from the first step shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm_async_spec.audit.report import Item, Lane, Report, Timeline

Event = dict[str, Any]

NO_TIMES = "--trace needs times, and an audit on a CPU has none; leave out --trace, or audit on a GPU"
_STEPS = 0
"""Thread identifier of the steps' track; the lanes follow."""


def chrome_trace(report: Report, before: Report | None = None) -> str | None:
    """The trace as JSON; with an earlier report, both as processes of one trace, each from its own zero.

    Returns:
        None if no report has a timeline with times.
    """
    named = [("before", before), ("after", report)] if before else [("audit", report)]
    shown = [(name, one) for name, one in named if one and one.timeline and not one.simulated]
    if not shown:
        return None
    events = [event for process, (name, one) in enumerate(shown, 1) for event in _process(process, name, one)]
    about = {
        name: {"headline": one.headline, "sentence": one.sentence, "command": one.command, "date": one.date}
        for name, one in shown
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, indent=1)


def _process(process: int, name: str, report: Report) -> Iterator[Event]:
    """The events of one report."""
    timeline = report.timeline
    assert timeline is not None
    yield _about("process_name", process, name=f"{name}: {report.engine.model}, vLLM {report.engine.vllm}")
    yield from _steps(process, timeline)
    for thread, lane in enumerate(timeline.lanes, _STEPS + 1):
        yield from _lane(process, thread, lane)


def _steps(process: int, timeline: Timeline) -> Iterator[Event]:
    yield from _track(process, _STEPS, "steps")
    ends = (*timeline.steps_us[1:], timeline.us)
    for number, (start, end) in enumerate(zip(timeline.steps_us, ends, strict=True), 1):
        yield _span(process, _STEPS, f"step {number}", "step", start, end - start)


def _lane(process: int, thread: int, lane: Lane) -> Iterator[Event]:
    """The events of a host thread, or of a stream of the device."""
    yield from _track(process, thread, lane.name)
    for item in lane.items:
        where = {"where": item.where} if item.where else {}
        yield _span(process, thread, _name(item), item.kind, item.start_us, item.us, **where)


def _track(process: int, thread: int, name: str) -> Iterator[Event]:
    yield _about("thread_name", process, thread, name=name)
    yield _about("thread_sort_index", process, thread, sort_index=thread)


def _about(what: str, process: int, thread: int = _STEPS, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


def _span(process: int, thread: int, name: str, kind: str, start: float, us: float, **arguments: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": start,
        "dur": us,
        "pid": process,
        "tid": thread,
        "args": arguments,
    }


def _name(item: Item) -> str:
    if item.kind == "wait":
        return f"{'critical ' if item.critical else ''}wait: {item.label}"
    return item.label
