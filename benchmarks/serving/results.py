"""Result files of served plans, written after every step, and their summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import PlanError, Plugin
from benchmarks.results import RESULTS, opened, write_result
from benchmarks.serving.plan import ServePlan, Step
from benchmarks.statistics import Interval, paired_ratio, refusal
from benchmarks.stored import files, read_json

SERVED = 1
"""The schema, under the key `served`, by which a file is known."""

Document = dict[str, Any]
Row = dict[str, Any]

_LEAST_MS = 1e-3
"""Least latency that counts: tokens that arrive in one piece have none between them."""
SPEEDS: dict[str, Callable[[Row], float]] = {
    "TPOT p50": lambda run: 1 / max(float(run["tpot"]["p50"]), _LEAST_MS),
    "TPOT p99": lambda run: 1 / max(float(run["tpot"]["p99"]), _LEAST_MS),
    "tokens/s": lambda run: float(run["output_throughput"]),
}
"""What arms are compared by, each larger where an arm is faster."""


class ServeFile:
    """The result of one served plan."""

    def __init__(self, path: Path, plan: ServePlan, *, fresh: bool = False) -> None:
        """Open the result file of `plan`, or start a new one, which is written with the first step.

        Raises:
            PlanError: the file holds something else.
        """
        self.path = path
        empty: Document = {
            "served": SERVED,
            "commands": [],
            "sessions": [],
            "tokens": {},
            "measured": [],
            "failures": [],
        }
        self.document = opened(path, asdict(plan), empty, read_served, _identity, fresh=fresh)

    def holds(self, step: Step, *, failed: bool) -> bool:
        """Whether the file has this step; with `failed`, a failed step counts."""
        if failed and any(_same(failure, step) for failure in self.document["failures"]):
            return True
        if step.load is None:
            return step.arm.name in self.document["tokens"]
        return any(_same(run, step) for run in self.document["measured"])

    def begin(self, command: str) -> None:
        """Begin a session: a run of the command, with servers of its own."""
        if command not in self.document["commands"]:
            self.document["commands"].append(command)
        self.document["sessions"].append({"servers": {}})

    def started(self, arm: str, start: Row, facts: Row) -> None:
        """Note how a server of this session started, and what it is."""
        self.document["sessions"][-1]["servers"][arm] = {"start": start, "facts": facts}
        self._write()

    def measured(self, step: Step, run: Row) -> None:
        """Add what a load came to."""
        assert step.load is not None
        session = len(self.document["sessions"]) - 1
        self._forget(step)
        self.document["measured"].append(_key(step) | {"session": session} | run)
        self._write()

    def compared(self, step: Step, samples: Row) -> None:
        """Add the comparison of an arm's tokens."""
        self._forget(step)
        self.document["tokens"][step.arm.name] = samples
        self._write()

    def failed(self, step: Step, why: str) -> None:
        """Add the failure of a step."""
        self._forget(step)
        self.document["failures"].append(_key(step) | {"error": why})
        self._write()

    def _forget(self, step: Step) -> None:
        """Forget an earlier failure of this step."""
        self.document["failures"] = [each for each in self.document["failures"] if not _same(each, step)]

    def _write(self) -> None:
        """Write the file.

        Raises:
            PlanError: it can't be written; the message says where all steps are kept.
        """
        write_result(self.path, self.document)


def read_served(path: Path) -> Document:
    """The content of a result file of a served plan.

    Raises:
        PlanError: this is no such file, or of another version.
    """
    found = find_served(path)
    if found is None:
        raise PlanError(f"{path} is not a result of `python -m benchmarks serve`; move the file, or name another")
    if found["served"] != SERVED:
        raise PlanError(f"{path} has schema {found['served']!r}; this version reads only schema {SERVED}")
    return found


def find_served(path: Path) -> Document | None:
    """The content of a result file of a served plan; None if the file is something else."""
    try:
        found = read_json(path)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "served" in found else None


def served_files(folder: Path = RESULTS) -> list[Path]:
    """Result files of served plans in a folder, ordered by name."""
    return [path for path in files(folder) if find_served(path) is not None]


def summarise(document: Document) -> list[Row]:
    """One row for each load and arm that were measured, loads outermost.

    A row has the medians over passes with lowest and highest, `n`, and `ratios` by the keys of `SPEEDS`: an interval,
    or the reason for its absence.
    """
    plan, rows = document["plan"], []
    for load in plan["loads"]:
        runs = {arm["name"]: _runs(document, arm["name"], load["name"]) for arm in plan["arms"]}
        for arm, found in runs.items():
            if found:
                row = {"load": load["name"], "rate": load["rate"], "arm": arm} | _figures([*found.values()])
                rows.append(row | {"ratios": _ratios(document, runs, arm)})
    return rows


def servers(document: Document) -> dict[str, Row]:
    """The latest server of each arm: its start and its facts."""
    return {arm: found for session in document["sessions"] for arm, found in session["servers"].items()}


def unlike(document: Document, arm: str) -> dict[str, int]:
    """Requests of an arm whose tokens differ from the reference's, by kind: `greedy`, `seeded`."""
    return {kind: sample["different"] for kind, sample in document["tokens"][arm].items() if "different" in sample}


def faults(document: Document) -> list[str]:
    """Sentences on arms with the plugin whose tokens are not the reference's, where those of the control are."""
    plan, tokens = document["plan"], document["tokens"]
    noise = unlike(document, plan["control"]) if plan["control"] in tokens else {}
    return [
        f"{arm['name']}: {different} {kind} requests have other tokens than {plan['reference']}'s"
        for arm in plan["arms"]
        if arm["plugin"] == Plugin.ON.value and arm["name"] in tokens
        for kind, different in unlike(document, arm["name"]).items()
        if different and not noise.get(kind)
    ]


def _figures(found: list[Row]) -> Row:
    row: Row = {"n": len(found), "requests": sum(run["completed"] for run in found)}
    for latency in ("ttft", "tpot", "itl"):
        row[latency] = {share: _spread([run[latency][share] for run in found]) for share in found[0][latency]}
    for name in ("output_throughput", "request_throughput", "request_goodput", "acceptance_length"):
        values = [run[name] for run in found if run.get(name) is not None]
        row[name] = _spread(values) if values else None
    return row


def _spread(values: list[float]) -> Row:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _runs(document: Document, arm: str, load: str) -> dict[int, Row]:
    return {run["pass"]: run for run in document["measured"] if (run["arm"], run["load"]) == (arm, load)}


def _ratios(document: Document, runs: dict[str, dict[int, Row]], arm: str) -> dict[str, Row]:
    plan = document["plan"]
    if arm == plan["reference"]:
        return {}
    used = [server for session in document["sessions"] for server in session["servers"].values()]
    machines = {str(server["facts"]["hardware"]) for server in used}
    found: dict[str, Row] = {}
    for name, speed in SPEEDS.items():
        ratio = _ratio(runs[plan["reference"]], runs[arm], speed)
        why = None
        if len(machines) > 1:
            why = f"the servers ran on {len(machines)} different machines"
        elif ratio is None:
            why = "fewer than two passes have both arms"
        elif arm != plan["control"] and plan["control"] in runs:
            why = refusal(_ratio(runs[plan["reference"]], runs[plan["control"]], speed))
        found[name] = {"refused": why} if why or ratio is None else asdict(ratio)
    return found


def _ratio(reference: dict[int, Row], other: dict[int, Row], speed: Callable[[Row], float]) -> Interval | None:
    both = sorted(reference.keys() & other.keys())
    return paired_ratio([speed(reference[number]) for number in both], [speed(other[number]) for number in both])


def _key(step: Step) -> Row:
    return {"load": step.load.name if step.load else None, "arm": step.arm.name, "pass": step.number}


def _same(entry: Row, step: Step) -> bool:
    return all(entry[name] == value for name, value in _key(step).items())


def _identity(plan: dict[str, Any]) -> dict[str, Any]:
    """The fields that two runs must share to be one result."""
    return {name: value for name, value in plan.items() if name not in ("about", "turns", "seconds")}
