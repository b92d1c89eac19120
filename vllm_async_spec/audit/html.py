"""Render an audit as one self-contained HTML file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_async_spec.audit import figures
from vllm_async_spec.audit.pages import page_environment
from vllm_async_spec.audit.report import Report


def render_html(report: Report, before: Report | None = None) -> str:
    """The page of a report; with an earlier report, both side by side."""
    named: list[tuple[str, Report]] = [("before", before), ("after", report)] if before else [("", report)]
    return _PAGES.get_template("page.html").render(
        report=report,
        before=before,
        reports=named,
        commands=_commands(report, before),
        compared=before is not None,
        timed=figures.is_timed(report, before),
        longest_phase=max((time.ms_per_step for _, one in named for time in one.phases), default=0) or 1,
        timelines=_timelines(named),
        f=figures,
    )


def _commands(report: Report, before: Report | None) -> dict[str, str]:
    """The commands, each with the name of its report where they differ."""
    if before is None or before.command == report.command:
        return {report.command: ""}
    return {before.command: "before", report.command: "after"}


def _timelines(named: list[tuple[str, Report]]) -> list[dict[str, Any]]:
    """Timelines for the page's script, without simulated ones, whose times say nothing of a GPU's."""
    return [
        {"name": name, **asdict(report.timeline)} for name, report in named if report.timeline and not report.simulated
    ]


_PAGES = page_environment("vllm_async_spec.audit")
_PAGES.filters |= {"number": figures.number, "percent": figures.percent}
