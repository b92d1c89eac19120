"""Published runs as one HTML file that needs nothing else, and a run as a badge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from vllm_async_spec.audit.pages import page_environment
from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.published import CLASSES, NOT_RUN, Row, Run

__all__ = ["badge", "render_html"]

_MEANINGS = {
    "none": "device lengths are enough",
    "prefill rows": "needs lengths of prefills, which the host knows anyway",
    "upper bound": "needs a bound of each length",
    "exact": "needs exact lengths of decodes, for which the host must wait",
    "blocks": "waits for the device whatever the host knows",
    NOT_RUN: "nothing can be said",
    "not constructed": "the builder can't be made here",
    "wrong with slack": "given a bound, it builds what kernels would read another value from",
    "changes the batch": "it writes into the metadata that all layers share",
    "kernels not validated": "some fields are what a kernel computes, and none ran",
    "attention wrong": "attention with what it builds from a bound is not the reference's",
    "waits in forward": "its layer waits for the device while it attends",
}
_MARKS = {
    "wrong with slack": "\u2260",
    "changes the batch": "\u0394",
    "kernels not validated": "\u2020",
    "attention wrong": "\u2717",
    "waits in forward": "\u2021",
}
"""What stands in a narrow column for a limit of the verdict."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One builder in one run."""

    backend: str
    run: Run | None
    row: Row | None
    text: str
    colour: str
    anchor: str


def render_html(runs: Sequence[Run], wanted: Sequence[tuple[str, str, str]] = ()) -> str:
    """The page of these runs.

    Args:
        runs: In the order of the columns.
        wanted: Release, `stock` or `plugin`, and machine of runs that have a column though nobody has run them.
    """
    columns = _columns(runs, wanted)
    names = list(dict.fromkeys(name for run in runs for name in (*(r.backend for r in run.rows), *run.absent)))
    table = {name: [_cell(name, run, label) for label, run in columns] for name in _sorted(names)}
    return _PAGES.get_template("page.html").render(
        runs=runs,
        columns=[label for label, _ in columns],
        table=table,
        classes=[name for name in CLASSES if any(cell.colour == _slug(name) for row in table.values() for cell in row)],
        meanings=_MEANINGS,
        marks=_MARKS,
        limits={limit for run in runs for row in run.rows for limit in row.limits},
        slug=_slug,
        releases=list(dict.fromkeys(label[0] for label, _ in columns)),
        ways=list(dict.fromkeys(label[1] for label, _ in columns)),
        machines=sorted({label[2] for label, _ in columns}, key=lambda machine: (machine != "cpu", machine)),
    )


def badge(run: Run) -> str:
    """The run's line as an SVG of 20 pixels' height, readable on light and on dark pages."""
    name, _, text = run.line.partition(": ")
    good = all(row.passed for row in run.rows) and bool(run.rows)
    return _PAGES.get_template("badge.svg").render(
        name=name, text=text, left=_width(name), right=_width(text), colour="#1f6f43" if good else "#9a3412"
    )


def _columns(
    runs: Sequence[Run], wanted: Sequence[tuple[str, str, str]]
) -> list[tuple[tuple[str, str, str], Run | None]]:
    found: dict[tuple[str, str, str], Run | None] = {(run.vllm or "none", run.way, run.machine): run for run in runs}
    for label in wanted:
        found.setdefault(label, None)

    def order(label: tuple[str, str, str]) -> tuple[list[int], bool, bool]:
        numbers = [int(part) for part in label[0].partition("+")[0].split(".") if part.isdigit()]
        return numbers, label[1] != "stock", label[2] != "cpu"

    return [(label, found[label]) for label in sorted(found, key=order)]


def _sorted(names: Sequence[str]) -> list[str]:
    """As `BACKENDS` has them, and then foreign ones."""
    known = list(BACKENDS)
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _cell(name: str, run: Run | None, label: tuple[str, str, str]) -> _Cell:
    anchor = _slug("-".join([name, *label]))
    if run is None:
        return _Cell(name, None, None, NOT_RUN, "absent", "")
    row = next((row for row in run.rows if row.backend == name), None)
    if row is None:
        return _Cell(name, run, None, run.absent.get(name, NOT_RUN), "absent", "")
    return _Cell(name, run, row, row.verdict, _slug(row.verdict), anchor)


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def _width(text: str) -> int:
    """Of 11 pixel Verdana, about; the text is stretched to it."""
    return round(6.3 * len(text)) + 10


def _named(text: str) -> Markup:
    """A name that a narrow page may break after its underscores."""
    return Markup(str(escape(text)).replace("_", "_<wbr>"))


_PAGES = page_environment("vllm_async_spec.compat")
_PAGES.filters["named"] = _named
