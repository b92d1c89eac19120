"""Audited results as a table: a row for each engine and load, with where its time goes and who waits."""

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


def cells(audit: dict[str, Any], speed: str) -> list[str]:
    """What a row says of one audit, under `HEAD`.

    Args:
        audit: `Report.to_dict()`.
        speed: the figure that was measured before the audit.
    """
    report = Report.from_dict(audit)
    critical = [cause for cause in report.causes if cause.place is Place.CRITICAL]
    sites = [f"`{_short(str(cause.site))}` {cause.kind.value} {cause.per_step:.2f}" for cause in critical]
    gpu, cost, plain = report.gpu, report.overhead, report.plain_idle
    not_recorded = "-" if plain is None else f"{plain:.2f}"
    shares = (
        [f"**{gpu.host_idle:.3f}**", not_recorded, f"{gpu.launch_gaps:.3f}", f"{gpu.busy:.3f}"] if gpu else ["-"] * 4
    )
    return [
        speed,
        *shares,
        f"{report.waits(Place.CRITICAL):.2f} ({report.waiting_ms(Place.CRITICAL):.2f} ms)",
        "; ".join(sites) or "nobody",
        f"{report.waits(Place.OVERLAPPED):.2f} ({report.waiting_ms(Place.OVERLAPPED):.2f} ms)",
        f"{cost.device_ratio:.2f}, {cost.ratio:.2f}" if cost else "-",
    ]


def _short(site: str) -> str:
    """A site without the directories that every site of vLLM has."""
    return site.removeprefix("vllm/v1/").replace("attention/backends/", "")
