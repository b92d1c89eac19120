"""Print an audit in the terminal."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_async_spec.audit.figures import (
    INCOMPARABLE,
    PLACES,
    SIMULATED,
    UNSEEN,
    Pair,
    compared_figures,
    facts,
    is_timed,
    key_figures,
    notes,
    number,
    paired_causes,
    paired_phases,
    phase_fields,
    ratio,
)
from vllm_async_spec.audit.report import Cause, DeviceTime, Place, Report

T = TypeVar("T")

_WIDE = 110
"""Terminal width from which on waits are a table; below, a list."""

_PHASE_FIELDS = {"ms_per_step": "ms", "waiting_ms_per_step": "waiting", "longest_step_ms": "longest"}
"""Heads of the columns of phases."""
_PLACE_STYLE = {Place.CRITICAL: "bold red", Place.OVERLAPPED: "yellow", Place.HIDDEN: "dim"}


def print_report(report: Report, console: Console, before: Report | None = None) -> None:
    """Print all of a report; with an earlier report, the figures of both side by side."""
    console.print(_Breakable(report.headline, style="bold"))
    if report.sentence:
        console.print(_Breakable(report.sentence))
    if before:
        said = ". ".join(filter(None, (before.headline, before.sentence)))
        console.print(_Breakable(f"Before: {said}", style="dim"))
    if report.simulated:
        console.print(Text(SIMULATED, style="yellow"))
    for part in _parts(report, before, wide=console.width >= _WIDE):
        console.print()
        console.print(part)


def _parts(report: Report, before: Report | None, *, wide: bool) -> Iterator[RenderableType]:
    yield _compared(before, report) if before else _figures(report)
    yield _facts(report, before)
    yield _causes(report, before, wide=wide)
    if report.gpu and report.gpu.gaps:
        yield _gaps(report.gpu)
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
    table.add_column()
    old = facts(before) if before else {}
    for name, fact in facts(report).items():
        was = old.get(name, fact)
        table.add_row(name, _Breakable(fact))
        if was != fact:
            table.add_row("", _Breakable(f"before: {was}", style="dim"))
    return table


def _causes(report: Report, before: Report | None, *, wide: bool) -> RenderableType:
    title = "What would make the host wait on a GPU" if report.simulated else "What made the host wait"
    pairs = paired_causes(before, report)
    if not pairs:
        return Text(f"{title}: no waits were found.")
    timed = is_timed(report, before)
    found = _cause_table if wide else _cause_list
    meanings = [
        Text.assemble((place.value, _PLACE_STYLE[place]), (f": {text}", "dim")) for place, text in PLACES.items()
    ]
    return Group(*found(title, pairs, compared=before is not None, timed=timed), Text(), *meanings)


def _cause_table(title: str, pairs: Iterable[Pair[Cause]], *, compared: bool, timed: bool) -> Iterator[RenderableType]:
    numbers = ("waits\na step", *(("ms\na step", "longest\nms") if timed else ()))
    table = _table(title, "wait", *(["when"] if compared else []), *numbers, "during", "where", right=numbers)
    for pair in pairs:
        cause, shown = pair.either, pair.all(compared=compared)
        columns = [_each(shown, lambda cause: cause.per_step)]
        if timed:
            columns += [_each(shown, lambda cause: cause.ms_per_step), _each(shown, lambda cause: cause.longest_ms)]
        table.add_row(
            Text.assemble(cause.kind.value, "\n", (cause.place.value, _PLACE_STYLE[cause.place])),
            *(["before\nafter"] if compared else []),
            *columns,
            Text.assemble(cause.phase.value, "\n", (cause.thread, "dim")),
            Group(*_where(cause)),
        )
    yield table


def _cause_list(title: str, pairs: Iterable[Pair[Cause]], *, compared: bool, timed: bool) -> Iterator[RenderableType]:
    """The same for a narrow terminal, in which a column would be too narrow for a path."""
    yield Text(title, style="bold")
    for pair in pairs:
        cause = pair.either
        said = [_in_words(one, timed=timed) for one in pair.all(compared=compared)]
        head = Text.assemble("\n", f"{cause.kind.value}, ", (cause.place.value, _PLACE_STYLE[cause.place]))
        yield head if compared else Text.assemble(head, f": {said[0]}")
        lines = (
            [Text(f"{when} {what}") for when, what in zip(("before:", "after: "), said, strict=True)]
            if compared
            else []
        )
        during = Text(f"{cause.phase.value}, {cause.thread}", style="dim italic")
        yield Padding(Group(*lines, *_where(cause), during), (0, 0, 0, 2))


def _in_words(cause: Cause | None, *, timed: bool) -> str:
    if cause is None:
        return "none"
    times = f", {number(cause.ms_per_step)} ms a step, longest {number(cause.longest_ms)} ms" if timed else ""
    return f"{number(cause.per_step)} waits a step{times}"


def _where(cause: Cause) -> Iterator[RenderableType]:
    yield _Breakable(str(cause.site or UNSEEN))
    if cause.site and cause.site.source:
        yield _Breakable(cause.site.source, style="dim")


def _gaps(gpu: DeviceTime) -> RenderableType:
    gaps = _table("Longest gaps of the device", "at, ms", "µs", "what the host did", right=("at, ms", "µs"))
    for gap in gpu.gaps:
        gaps.add_row(number(gap.start_us / 1000), f"{gap.us:.0f}", _Breakable(gap.host))
    return gaps


def _phases(report: Report, before: Report | None) -> RenderableType:
    pairs = paired_phases(before, report)
    fields = phase_fields(pairs)
    reports = ("",) if before is None else ("\nbefore", "\nafter")
    names = tuple(f"{_PHASE_FIELDS[field]}{when}" for field in fields for when in reports)
    table = _table("Host time, ms a step", "phase", "thread", *names, right=names)
    for pair in pairs:
        shown = pair.all(compared=before is not None)
        columns = [_each([time], operator.attrgetter(field)) for field in fields for time in shown]
        table.add_row(pair.either.phase.value, pair.either.thread, *columns)
    return table


def _notes(report: Report, before: Report | None) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for note in notes(report, before):
        table.add_row("-", _Breakable(note))
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
    """Text whose words stay whole: one that is longer than a line breaks after a slash, or else after punctuation."""

    def __init__(self, text: str, style: str = "") -> None:
        self.words = re.findall(r"\S+\s*|\s+", text)
        self.style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for piece in self._pieces(options.max_width):
            if line and len(line + piece.rstrip()) > options.max_width:
                yield self._text(line)
                line = ""
            line += piece
        yield self._text(line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._pieces(1)), default=0), sum(map(len, self.words)))

    def _pieces(self, width: int) -> Iterator[str]:
        """What a line may hold or not, but not a part of."""
        for word in self.words:
            if len(word.rstrip()) <= width:
                yield word
                continue
            for part in re.findall(r"[^/]*/+|[^/]+", word):
                yield from [part] if len(part.rstrip()) <= width else re.findall(r"[^.,(_]*[.,(_]+|[^.,(_]+", part)

    def _text(self, line: str) -> Text:
        return Text(line.rstrip(), style=self.style, overflow="fold")
