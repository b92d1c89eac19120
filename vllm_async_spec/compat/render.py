"""Render a run of the suite: for the terminal, as JUnit XML, as Markdown, as one HTML file, as a badge."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from vllm_async_spec.audit.pages import page_environment
from vllm_async_spec.compat.advice import advised
from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.error_text import printable
from vllm_async_spec.compat.legend import EXCLUDED, LEGEND, excluded
from vllm_async_spec.compat.report import CLASSES, NOT_RUN, Report, Row, Run
from vllm_async_spec.compat.results import NOT_SHOWN_CLEAN, BackendResult, CaseResult, Need

_STYLE = {
    None: "dim",
    Need.NONE: "green",
    Need.PREFILL_ROWS: "green",
    Need.UPPER_BOUND: "green",
    Need.EXACT: "bold red",
    Need.BLOCKING: "bold red",
}

_MEANINGS = {
    "none": "device lengths are enough",
    "prefill rows": "needs the lengths of prefills, which the host always knows",
    "upper bound": "needs an upper bound of each length",
    "exact": "needs exact lengths of decodes, so the host must wait for the device",
    "blocks": "waits for the device even if the host knows all lengths",
    "fails": "raises, or its forward raises, with a batch that vLLM's engine makes",
    NOT_RUN: "no batch of a step ran, so there is no result",
    "not constructed": "the suite could not construct the builder",
    "wrong with slack": "built with an upper bound instead of exact lengths, the metadata has wrong values",
    "wrong after updates": "metadata that were updated for the next draft step have wrong values",
    "changes the batch": "the builder changes metadata that all layers share",
    "kernels not validated": "some fields depend on kernels that did not run",
    "attention wrong": "with metadata built with an upper bound, attention differs from the reference",
    "waits in forward": "the layer's forward waits for the device",
    "wrong fields": "fields of vLLM's names differ from the batch even with exact lengths",
    NOT_SHOWN_CLEAN: "no batch reached some lines that could wait; the evidence names them",
    "keeps other batches": "after other batches, the same builder builds something else",
}
_MARKS = {
    "wrong with slack": "\u2260",
    "wrong after updates": "\u21bb",
    "changes the batch": "\u0394",
    "kernels not validated": "\u2020",
    "attention wrong": "\u2717",
    "waits in forward": "\u2021",
    "wrong fields": "\u00a7",
    "keeps other batches": "\u21ba",
    NOT_SHOWN_CLEAN: "?",
}
"""Marks for the limits of a verdict, in narrow columns."""

_FEW = 5
"""Most lines shown of each builder that no batch reached."""


def print_report(report: Report, console: Console) -> None:
    """Print the table, and below it the faults and the summary."""
    vllm = "without vLLM" if report.release is None else f"vLLM {report.release}"
    plugin = " with the plugin" if report.patched else ""
    table = Table(title=f"{vllm}{plugin}, PyTorch {report.torch}, {report.device}", title_justify="left")
    run = report.published
    attended = any(not row.attention.startswith(NOT_RUN) for row in run.rows)
    forward = ("waits in forward", "attention") if attended else ()
    for name in ("backend", "needs of the host", "batches", "branches", "waits or fails at", *forward, "models"):
        table.add_column(name, overflow="fold", no_wrap=name == "backend")
    for result, row in zip(report.results, run.rows, strict=True):
        unsure = result.passed and not result.shown_clean
        style = "bold red" if result.faults else "yellow" if unsure else _STYLE[result.need]
        at = escape_markup("\n".join(row.sites))
        ran = f"{row.ran} of {row.batches}"
        cells = row.backend, f"[{style}]{escape_markup(row.cell)}[/]", ran, row.branches or "-", at
        table.add_row(*cells, *((row.forward_waits, row.attention) if attended else ()), ", ".join(row.models))
    for name, why in run.absent.items():
        table.add_row(name, f"[dim]{escape_markup(why)}[/]", "-", "-", "", *(("-", "-") if attended else ()))
    console.print(table)
    left_out = excluded(run)
    for line in (LEGEND, *([EXCLUDED] if left_out else []), *left_out):
        console.print(line, markup=False, highlight=False, soft_wrap=True, style="dim")
    for result in report.results:
        for line in _first_faults(result):
            console.print(f"{result.backend}: {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(report.summary, style="bold")
    console.print(run.line, markup=False, highlight=False)
    if report.device == "cpu":
        hidden = (
            "kernel results and unpinned memory"
            if attended
            else "kernel results, unpinned memory and waits in forwards"
        )
        console.print(
            f"A simulated device does not show {hidden}. --json has every batch and every fault.", style="dim"
        )


def _first_faults(result: BackendResult) -> list[str]:
    """Each kind of fault once, with the first batch that has it; or the reason why nothing ran."""
    if result.untried:
        return [result.explain().removeprefix(f"{result.backend}: ")]
    found: dict[str, str] = {}
    for case, faults in result.faults.items():
        for fault in faults:
            found.setdefault(fault.partition(" is ")[0], f"{case}: {advised(fault)}")
    return list(found.values()) or _not_shown(result)


def _not_shown(result: BackendResult) -> list[str]:
    """The lines that could wait and that no batch reached; the first few."""
    told = [f"{NOT_SHOWN_CLEAN}, no batch reached {each}" for each in result.unreached[:_FEW]]
    left = len(result.unreached) - _FEW
    return [*told, *([f"{NOT_SHOWN_CLEAN}, and {left} more such lines: see --json"] if left > 0 else [])]


def junit(report: Report) -> str:
    """The run as JUnit XML: a suite for each builder, a test for each batch."""
    root = ET.Element("testsuites", name=f"vllm-async-spec compat {report.version}")
    for result in report.results:
        suite = ET.SubElement(root, "testsuite", name=result.backend)
        cases = result.cases or (CaseResult("construction", None, Host.EXACT),)
        counts = {"tests": len(cases), "failures": 0, "skipped": 0, "errors": 0}
        for case in cases:
            test = ET.SubElement(suite, "testcase", classname=result.backend, name=result.label(case))
            faults = () if case.capture and not case.failed else case.faults
            if result.failure is not None:
                counts["errors"] += 1
                ET.SubElement(test, "error", message=result.failure)
            elif case.not_run is not None:
                counts["skipped"] += 1
                ET.SubElement(test, "skipped", message=case.not_run)
            elif faults:
                counts["failures"] += 1
                ET.SubElement(test, "failure", message=faults[0]).text = "\n".join(map(advised, faults))
        if result.passed and not result.shown_clean:
            counts |= {"tests": counts["tests"] + 1, "skipped": counts["skipped"] + 1}
            test = ET.SubElement(suite, "testcase", classname=result.backend, name=NOT_SHOWN_CLEAN)
            told = "\n".join(f"no batch reached {each}" for each in result.unreached)
            ET.SubElement(test, "skipped", message=told.partition("\n")[0]).text = told
        if result.unfinished is not None:
            counts |= {"tests": counts["tests"] + 1, "errors": counts["errors"] + 1}
            test = ET.SubElement(suite, "testcase", classname=result.backend, name="left out")
            ET.SubElement(test, "error", message=result.unfinished)
        for name, count in counts.items():
            suite.set(name, str(count))
    ET.indent(root)
    # XML can't hold the characters that, for example, the key of a builder's dictionary may have.
    return printable(ET.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"


def markdown(run: Run) -> str:
    """The run as a Markdown page: the table, and below it for each builder the faults and what was not run."""
    vllm = "without vLLM" if run.vllm is None else f"vLLM {run.vllm}"
    way = "stock" if run.plugin is None else "with the plugin"
    where = "a simulated device" if run.device == "cpu" else run.device
    lines = [
        f"# {vllm}, {way}" + ("" if run.device == "cpu" else f", {run.device}"),
        "",
        f"vllm-async-spec {run.version}, PyTorch {run.torch}, {where}, {run.date}. {run.summary}.",
        "",
        "```bash",
        run.command,
        "```",
    ]
    if run.plugin is not None:
        lines += ["", f"Patches applied: {', '.join(run.plugin) or 'none'}."]
    heads = (
        "backend",
        "needs of the host",
        "batches run",
        "branches reached",
        "waits or fails at",
        "waits in forward",
        "attention",
        "models",
    )
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in run.rows:
        at = "<br>".join(f"`{site}`" for site in row.sites)
        link = f"[{row.backend}](#{row.backend.lower()})" if row.evidence else row.backend
        ran = f"{row.ran} of {row.batches} | {row.branches or '-'}"
        models = ", ".join(row.models)
        lines.append(f"| {link} | {row.cell} | {ran} | {at} | {row.forward_waits} | {row.attention} | {models} |")
    lines += [f"| {name} | {why} | - | - |  | - | - |  |" for name, why in run.absent.items()]
    for row in run.rows:
        if row.evidence:
            told = [f"- {line} ({'; '.join(cases)})" if cases else f"- {line}" for line, cases in row.evidence]
            lines += ["", f"## {row.backend}", "", *told]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Cell:
    """One builder in one run."""

    run: Run | None
    row: Row | None
    text: str
    colour: str
    anchor: str


def render_html(runs: Sequence[Run], wanted: Sequence[tuple[str, str, str]] = ()) -> str:
    """The page of these runs, in the order of the columns.

    Args:
        runs: The runs.
        wanted: Release, `stock` or `plugin`, and machine of runs that have a column even if they are missing.
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
        unsure=NOT_SHOWN_CLEAN,
        limits={limit for run in runs for row in run.rows for limit in row.limits},
        slug=_slug,
        releases=list(dict.fromkeys(label[0] for label, _ in columns)),
        ways=list(dict.fromkeys(label[1] for label, _ in columns)),
        machines=sorted({label[2] for label, _ in columns}, key=lambda machine: (machine != "cpu", machine)),
    )


def badge(run: Run) -> str:
    """The run's line as an SVG of 20 pixels' height, readable on light and on dark pages.

    Green: all builders are shown clean. Ochre: none has a fault, and some are not shown clean. Red: any other result.
    """
    name, _, text = run.line.partition(": ")
    good = all(row.passed for row in run.rows) and bool(run.rows)
    unsure = any(NOT_SHOWN_CLEAN in row.limits for row in run.rows)
    colour = "#9a3412" if not good else "#7a5c00" if unsure else "#1f6f43"
    return _PAGES.get_template("badge.svg").render(
        name=name, text=text, left=_width(name), right=_width(text), colour=colour
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
    """In the order of `BACKENDS`, then third-party builders."""
    known = list(BACKENDS)
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _cell(name: str, run: Run | None, label: tuple[str, str, str]) -> _Cell:
    anchor = _slug("-".join([name, *label]))
    if run is None:
        return _Cell(None, None, NOT_RUN, "absent", "")
    row = next((row for row in run.rows if row.backend == name), None)
    if row is None:
        return _Cell(run, None, run.absent.get(name, NOT_RUN), "absent", "")
    return _Cell(run, row, row.verdict, _slug(row.verdict), anchor)


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def _width(text: str) -> int:
    """Approximate width in pixels of 11-pixel Verdana, with padding; the badge stretches the text to fit."""
    return round(6.3 * len(text)) + 10


def _named(text: str) -> Markup:
    """A name that a narrow page may break after its underscores."""
    return Markup(str(escape(text)).replace("_", "_<wbr>"))


_PAGES = page_environment("vllm_async_spec.compat")
_PAGES.filters["named"] = _named
