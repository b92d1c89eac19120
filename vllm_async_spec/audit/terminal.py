"""Print an audit in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vllm_async_spec.audit.figures import (
    INCOMPARABLE,
    PLACES,
    SIMULATED,
    UNSEEN,
    compared_figures,
    facts,
    is_timed,
    key_figures,
    number,
    paired_causes,
    paired_phases,
    percent,
    ratio,
    recording_cost,
)
from vllm_async_spec.audit.report import Cause, DeviceTime, Place, Report

T = TypeVar("T")

_WIDE = 110
"""Terminal width from which on a wait's phase has a column of its own."""

_PLACE_STYLE = {Place.CRITICAL: "bold red", Place.OVERLAPPED: "yellow", Place.HIDDEN: "dim"}


def print_report(report: Report, console: Console, before: Report | None = None) -> None:
    """Print all of a report; with an earlier report, the figures of both side by side."""
    console.print(Text(report.headline, style="bold"))
    if before:
        console.print(Text(f"Before: {before.headline}", style="dim"))
    if report.simulated:
        console.print(Text(SIMULATED, style="yellow"))
    for part in _parts(report, before, wide=console.width >= _WIDE):
        console.print()
        console.print(part)


def _parts(report: Report, before: Report | None, *, wide: bool) -> Iterator[RenderableType]:
    yield _compared(before, report) if before else _figures(report)
    yield _facts(report, before)
    yield _causes(report, before, wide=wide)
    if report.gpu:
        yield _device(report.gpu, before.gpu if before else None)
    if report.phases and is_timed(report, before):
        yield _phases(report, before)
    yield _notes(report, before)


def _figures(report: Report) -> RenderableType:
    table = _grid()
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for figure in key_figures(report):
        table.add_row(figure.name, figure.text, figure.unit, figure.detail)
    return table


def _compared(before: Report, after: Report) -> RenderableType:
    pairs = compared_figures(before, after)
    if not pairs:
        return Text(INCOMPARABLE, style="yellow")
    table = _table("Before and after", "figure", "before", "after", "ratio", "unit", right=("before", "after", "ratio"))
    for old, new in pairs:
        table.add_row(new.name, old.text, Text(new.text, style="bold"), ratio(old.value, new.value), new.unit)
    return table


def _facts(report: Report, before: Report | None) -> RenderableType:
    table = _grid()
    table.add_column(overflow="fold")
    old = facts(before) if before else {}
    for name, fact in facts(report).items():
        text = Text(fact)
        if old.get(name, fact) != fact:
            text.append(f"\nbefore: {old[name]}", style="dim")
        table.add_row(name, text)
    return table


def _causes(report: Report, before: Report | None, *, wide: bool) -> RenderableType:
    title = "What would make the host wait on a GPU" if report.simulated else "What made the host wait"
    pairs = paired_causes(before, report)
    if not pairs:
        return Text(f"{title}: no waits were found.")
    compared, timed = before is not None, is_timed(report, before)
    numbers = ("waits\na step", *(("ms\na step", "longest\nms") if timed else ()))
    names = ["wait", *(["when"] if compared else []), *numbers, *(["during"] if wide else []), "where"]
    table = _table(title, *names, right=numbers)
    for pair in pairs:
        cause, shown = pair.either, pair.all(compared=compared)
        columns = [_each(shown, lambda cause: cause.per_step)]
        if timed:
            columns += [_each(shown, lambda cause: cause.ms_per_step), _each(shown, lambda cause: cause.longest_ms)]
        table.add_row(
            Text.assemble(cause.kind.value, "\n", (cause.place.value, _PLACE_STYLE[cause.place])),
            *(["before\nafter"] if compared else []),
            *columns,
            *([Text.assemble(cause.phase.value, "\n", (cause.thread, "dim"))] if wide else []),
            _where(cause, with_phase=not wide),
        )
    meanings = [
        Text.assemble((place.value, _PLACE_STYLE[place]), (f": {text}", "dim")) for place, text in PLACES.items()
    ]
    return Group(table, Text(), *meanings)


def _where(cause: Cause, *, with_phase: bool) -> RenderableType:
    parts: list[RenderableType] = [_Breakable(str(cause.site or UNSEEN))]
    if cause.site and cause.site.source:
        parts.append(_Breakable(cause.site.source, after="/.,(", style="dim"))
    if with_phase:
        parts.append(Text(f"{cause.phase.value}, {cause.thread}", style="dim italic"))
    return Group(*parts)


def _device(gpu: DeviceTime, before: DeviceTime | None) -> RenderableType:
    timed = ("before", "after") if before else ("%",)
    table = _table("How the device spent the time, %", "", *timed, right=timed)
    for name, share in (
        ("busy", "busy"),
        ("launch gaps, under 3 µs", "launch_gaps"),
        ("host-caused idle, gaps of 3 µs and more", "host_idle"),
    ):
        table.add_row(name, *(percent(getattr(time, share)) for time in (before, gpu) if time))
    if not gpu.gaps:
        return table
    gaps = _table("Longest gaps", "at, ms", "µs", "what the host did", right=("at, ms", "µs"))
    for gap in gpu.gaps:
        gaps.add_row(number(gap.start_us / 1000), f"{gap.us:.0f}", _Breakable(gap.host))
    return Group(table, Text(), gaps)


def _phases(report: Report, before: Report | None) -> RenderableType:
    names = ("ms", "waiting") if before is None else ("ms\nbefore", "ms\nafter", "waiting\nbefore", "waiting\nafter")
    table = _table("Host time, ms a step", "phase", "thread", *names, right=names)
    for pair in paired_phases(before, report):
        shown = pair.all(compared=before is not None)
        columns = [_each([time], lambda time: time.ms_per_step) for time in shown]
        columns += [_each([time], lambda time: time.waiting_ms_per_step) for time in shown]
        table.add_row(pair.either.phase.value, pair.either.thread, *columns)
    return table


def _notes(report: Report, before: Report | None) -> RenderableType:
    notes = [recording_cost(report), *report.notes]
    if before:
        notes += [f"Before: {note}" for note in (recording_cost(before), *before.notes)]
    table = Table.grid(padding=(0, 1))
    for note in notes:
        table.add_row("-", Text(note))
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    return table


def _table(title: str, *names: str, right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    table.padding = (0, 1, 0, 0)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return table


def _each(shown: Iterable[T | None], value: Callable[[T], float]) -> str:
    """The values, a line each; `-` for a missing item."""
    return "\n".join("-" if one is None else number(value(one)) for one in shown)


class _Breakable:
    """Text that may also break after some characters, so that no name is cut in the middle."""

    def __init__(self, text: str, after: str = "/", style: str = "") -> None:
        self.pieces = re.findall(rf"[^{after}\s]+[{after}\s]?|[{after}\s]", text)
        self.style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for piece in self.pieces:
            if line and len(line + piece.rstrip()) > options.max_width:
                yield self._text(line)
                line = ""
            line += piece
        yield self._text(line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self.pieces), default=0), sum(len(piece) for piece in self.pieces))

    def _text(self, line: str) -> Text:
        return Text(line.rstrip(), style=self.style, overflow="fold")
