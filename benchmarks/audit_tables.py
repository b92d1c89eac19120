"""What the audits in the results of plans say: the host time of a step by phase, and the waits of each rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arms import tensor_ranks
from benchmarks.audited import load_and_rank
from benchmarks.present import Grid
from benchmarks.published import devices
from benchmarks.results import read_result, result_files
from vllm_async_spec.audit.report import Phase

_HEAD = ("vLLM, runner", "GPU", "shape", "load", "arm")


@dataclass(frozen=True, slots=True)
class _Audit:
    ranks: int
    rank: int
    order: tuple[Any, ...]
    """What the rows of a table are sorted by."""
    cells: tuple[str, ...]
    """Those of `_HEAD`."""
    said: dict[str, Any]


def host_time_grid(results: Path) -> Grid:
    """The host time of a step by phase: a row for each audit of an engine of one rank."""
    found = [each for each in _audits(results) if each.ranks == 1]
    phases = [phase.value for phase in Phase if any(phase.value in each.said["phases"] for each in found)]
    head = (*_HEAD, "ms a step", "critical waits", "pageable copies", "idle", *phases)
    return Grid(head, [(*each.cells, *_phases(each.said, phases)) for each in found])


def ranks_grid(results: Path) -> Grid:
    """Where each rank of an engine waits: a row for each audit of an engine of several ranks."""
    head = (*_HEAD, "rank", "ms a step", "critical waits a step", "lines that wait", "idle")
    return Grid(head, [(*each.cells, *_waits(each)) for each in _audits(results) if each.ranks > 1])


def _audits(results: Path) -> list[_Audit]:
    found = [each for path in result_files(results) for each in _of(read_result(path))]
    return sorted(found, key=lambda each: each.order)


def _of(document: dict[str, Any]) -> Iterator[_Audit]:
    arms = {arm["name"]: (number, arm) for number, arm in enumerate(document["plan"]["arms"])}
    loads = [load["name"] for load in document["plan"]["loads"]]
    for turn in document["turns"]:
        for name, audit in turn.get("audits", {}).items():
            if audit["step_ms"] is None:  # of a CPU
                continue
            (load, rank), (number, arm) = load_and_rank(name), arms[turn["arm"]]
            (vllm, runner), shape = (turn["facts"][name] for name in ("vllm", "runner")), arm["shape"]
            yield _Audit(
                tensor_ranks(arm["engine"]),
                rank,
                ([int(part) for part in vllm.split(".")], runner, shape, loads.index(load), number, rank),
                (f"{vllm}, {runner}", devices(turn["facts"], arm["engine"]), shape, load, turn["arm"]),
                audit,
            )


def _phases(audit: dict[str, Any], phases: Sequence[str]) -> Iterator[str]:
    yield f"{audit['step_ms']:.2f}"
    yield f"{audit['critical'][0]:.2f}"
    yield f"{sum(per_step for _, per_step, _ in audit['pageable']):.1f}"
    yield _idle(audit)
    stalls = audit.get("stalls", {})  # older results do not say
    for phase in phases:
        stall = f" ({stalls[phase]:.0f} in one step)" if phase in stalls else ""
        yield f"{audit['phases'].get(phase, 0):.2f}{stall}"


def _waits(audit: _Audit) -> Iterator[str]:
    said = audit.said
    yield str(audit.rank)
    yield f"{said['step_ms']:.2f}"
    yield f"{said['critical'][0]:.2f}"
    yield "; ".join(f"`{site}` {per_step:.2f}" for site, _, per_step in said["sites"]) or "none"
    yield _idle(said)


def _idle(audit: dict[str, Any]) -> str:
    return "-" if audit["plain_idle"] is None else f"{audit['plain_idle']:.0%}"
