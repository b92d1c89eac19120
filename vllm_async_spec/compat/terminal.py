"""A run of the suite for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_async_spec.compat.published import NOT_RUN
from vllm_async_spec.compat.report import Report
from vllm_async_spec.compat.results import BackendResult, Need

__all__ = ["print_report"]

_STYLE = {
    None: "dim",
    Need.NONE: "green",
    Need.PREFILL_ROWS: "green",
    Need.UPPER_BOUND: "green",
    Need.EXACT: "bold red",
    Need.BLOCKING: "bold red",
}


def print_report(report: Report, console: Console) -> None:
    """Print the table, and below it what is not in it.

    Args:
        report: The run.
        console: Where to.
    """
    vllm = "without vLLM" if report.release is None else f"vLLM {report.release}"
    plugin = " with the plugin" if report.patched else ""
    table = Table(title=f"{vllm}{plugin}, PyTorch {report.torch}, {report.device}", title_justify="left")
    run = report.published
    attended = any(not row.attention.startswith(NOT_RUN) for row in run.rows)
    forward = ("waits in forward", "attention") if attended else ()
    for name in ("backend", "needs of the host", "batches", "waits or fails at", *forward):
        table.add_column(name, overflow="fold", no_wrap=name == "backend")
    for result, row in zip(report.results, run.rows, strict=True):
        style = "bold red" if result.faults else _STYLE[result.need]
        at = "\n".join(row.sites)
        cells = row.backend, f"[{style}]{escape(row.cell)}[/]", f"{row.ran} of {row.batches}", escape(at)
        table.add_row(*cells, *((row.forward_waits, row.attention) if attended else ()))
    for name, why in run.absent.items():
        table.add_row(name, f"[dim]{escape(why)}[/]", "-", "", *(("-", "-") if attended else ()))
    console.print(table)
    for result in report.results:
        for line in _first_faults(result):
            console.print(f"{result.backend}: {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(report.summary, style="bold")
    console.print(run.line, markup=False, highlight=False)
    if report.device == "cpu":
        seen = (
            "what kernels compute, and memory that is not pinned,"
            if attended
            else ("what kernels compute, memory that is not pinned, and waits of a forward")
        )
        console.print(f"A simulated device: {seen} are not seen. --json has every batch and every line.", style="dim")


def _first_faults(result: BackendResult) -> list[str]:
    """Each kind of fault once, with the first batch that has it; or why nothing ran."""
    if not result.steps:
        return [result.explain().removeprefix(f"{result.backend}: ")]
    found: dict[str, str] = {}
    for case, faults in result.faults.items():
        for fault in faults:
            found.setdefault(fault.partition(" is ")[0], f"{case}: {fault}")
    return list(found.values())
