"""The host time of a step by phase, of every audit that a plan's result holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.audited import load_and_rank
from benchmarks.present import Grid
from benchmarks.published import devices
from benchmarks.results import read_result, result_files
from vllm_async_spec.audit.report import Phase

_PHASES = [phase.value for phase in Phase if phase is not Phase.AGREEMENT]
"""Without that of data parallelism, which no plan has."""


def host_time_grid(results: Path) -> Grid:
    """The host time of a step by phase: a row for each audit of an arm of a plan's result."""
    rows = sorted((row for path in result_files(results) for row in _rows(read_result(path))), key=lambda row: row[0])
    head = ("vLLM", "GPU", "shape", "load", "arm", "rank", "ms a step", "critical waits", "pageable copies", "idle", *_PHASES)
    return Grid(head, [cells for _, cells in rows])


def _rows(document: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], tuple[str, ...]]]:
    """The rows of a result, each after what it is sorted by."""
    arms = {arm["name"]: (number, arm) for number, arm in enumerate(document["plan"]["arms"])}
    loads = [load["name"] for load in document["plan"]["loads"]]
    for turn in document["turns"]:
        for name, audit in turn.get("audits", {}).items():
            if audit["step_ms"] is None:  # of a CPU
                continue
            (load, rank), (number, arm) = load_and_rank(name), arms[turn["arm"]]
            vllm, shape = turn["facts"]["vllm"], arm["shape"]
            order = ([int(part) for part in vllm.split(".")], shape, loads.index(load), number, rank)
            devices_ = devices(turn["facts"], arm["engine"])
            yield order, (vllm, devices_, shape, load, turn["arm"], str(rank), *_cells(audit))


def _cells(audit: dict[str, Any]) -> Iterator[str]:
    yield f"{audit['step_ms']:.2f}"
    yield f"{audit['critical'][0]:.2f}"
    yield f"{sum(per_step for _, per_step, _ in audit['pageable']):.1f}"
    yield "-" if audit["plain_idle"] is None else f"{audit['plain_idle']:.0%}"
    yield from (f"{audit['phases'].get(phase, 0):.2f}" for phase in _PHASES)
