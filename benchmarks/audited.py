"""Audited results as a table: a row for each engine and load, with shares of its time and the code that waits."""

from __future__ import annotations

from typing import Any

from vllm_async_spec.audit.report import Place, Report

HEAD = (
    "ms a step, or tokens/s",
    "host-caused idle",
    "not recorded",
    "launch gaps",
    "busy",
    "critical waits a step",
    "who waits on the critical path",
    "overlapped",
    "recording",
)


def digest(report: Report) -> dict[str, Any]:
    """The part of an audit that a result keeps: the values of its row. The whole report is twenty times as long."""
    gpu, cost = report.gpu, report.overhead
    critical = [cause for cause in report.causes if cause.place is Place.CRITICAL]
    return {
        "host_idle": gpu and gpu.host_idle,
        "plain_idle": report.plain_idle,
        "launch_gaps": gpu and gpu.launch_gaps,
        "busy": gpu and gpu.busy,
        "critical": [report.waits(Place.CRITICAL), report.waiting_ms(Place.CRITICAL)],
        "sites": [[_short(str(cause.site)), cause.kind.value, cause.per_step] for cause in critical],
        "overlapped": [report.waits(Place.OVERLAPPED), report.waiting_ms(Place.OVERLAPPED)],
        "recording": cost and [cost.device_ratio, cost.ratio],
    }


def cells(audit: dict[str, Any], speed: str) -> list[str]:
    """The cells of one audit, under `HEAD`.

    Args:
        audit: its `digest`.
        speed: the speed measured before the audit.
    """
    sites = [f"`{site}` {kind} {per_step:.2f}" for site, kind, per_step in audit["sites"]]
    waits, waiting_ms = audit["critical"]
    beside, beside_ms = audit["overlapped"]
    return [
        speed,
        _share(audit["host_idle"], "**{:.3f}**"),
        _share(audit["plain_idle"] if audit["host_idle"] is not None else None, "{:.2f}"),
        _share(audit["launch_gaps"], "{:.3f}"),
        _share(audit["busy"], "{:.3f}"),
        f"{waits:.2f} ({waiting_ms:.2f} ms)",
        "; ".join(sites) or "nobody",
        f"{beside:.2f} ({beside_ms:.2f} ms)",
        "{:.2f}, {:.2f}".format(*audit["recording"]) if audit["recording"] else "-",
    ]


def _share(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _short(site: str) -> str:
    """A site without the directories that every site of vLLM has."""
    return site.removeprefix("vllm/v1/").replace("attention/backends/", "")
