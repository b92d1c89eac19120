"""Result files of served plans, written after every step, and their summary."""

import statistics
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import PlanError, Plugin
from benchmarks.results import RESULTS, opened, write_result
from benchmarks.serving.plan import ServePlan, Step
from benchmarks.statistics import Interval, paired_ratio, refusal
from benchmarks.stored import files, read_json, without
from benchmarks.summary import Place, Row, beside

_FREE = ("about", "turns", "seconds", "audited", "audit_steps")
"""Fields of a plan in which two runs of one result may differ."""
SERVED = 1
"""The schema, under the key `served`, by which a file is known."""

Document = dict[str, Any]
Runs = dict[Place, Row]
"""Runs of an arm under a load, by session and pass."""
ANY = object()

_LEAST_MS = 1e-3
"""Least latency that counts: tokens that arrive in one piece have none between them."""
SPEEDS: dict[str, Callable[[Row], float]] = {
    "TPOT p50": lambda run: 1 / max(float(run["tpot"]["p50"]), _LEAST_MS),
    "TPOT p99": lambda run: 1 / max(float(run["tpot"]["p99"]), _LEAST_MS),
    "tokens/s": lambda run: float(run["output_throughput"]),
}
"""What arms are compared by, each larger where an arm is faster."""
_DERIVED = ("seconds", "output_tokens", "request_throughput")
"""Figures of a pass that follow from its load and its tokens/s."""
_HARDWARE = {"cores": "{} cores", "memory_gib": "{} GiB", "driver": "driver {}", "cuda": "CUDA {}"}
"""How a machine's name puts facts of it that are no names themselves."""


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
            "starts": [],
            "audits": [],
            "failures": [],
        }
        self.document = opened(path, asdict(plan), empty, read_served, _identity, fresh=fresh)

    def holds(self, step: Step, beside: Collection[str], *, failed: bool) -> bool:
        """Whether the file has this step; with `failed`, a failed step counts.

        A load counts if the session that measured it has the arms `beside` in the same pass, so that rows of two runs
        are never compared.
        """
        if failed and any(_same(failure, step) for failure in self.document["failures"]):
            return True
        if step.load is None:
            return step.arm.name in self.document["tokens"] and not self._lacks_hashes(step.arm.name)
        if step.audits:
            return any(_same(audit, step) for audit in self.document.get("audits", ()))
        place = _key(step) | {"arm": ANY}
        gone = {each["arm"] for each in self.document["failures"] if failed and _at(each, place)}
        arms: dict[int, set[str]] = {}
        for run in self.document["measured"]:
            if _at(run, place):
                arms.setdefault(run["session"], set()).add(run["arm"])
        return any({step.arm.name, *beside} - gone <= found for found in arms.values())

    def begin(self, command: str) -> None:
        """Begin a session: a run of the command, with servers of its own."""
        if command not in self.document["commands"]:
            self.document["commands"].append(command)
        self.document["sessions"].append({"servers": {}})

    def started(self, arm: str, start: Row | None, facts: Row) -> None:
        """Note what a server of this session is, and how it started; no start, if it is one to be audited."""
        if start is not None:
            self.document["sessions"][-1]["servers"][arm] = {"facts": facts}
            self.document.setdefault("starts", []).append({"arm": arm} | start)
        else:
            self.document["sessions"][-1]["servers"].setdefault(arm, {"facts": facts})
        self._write()

    def measured(self, step: Step, run: Row) -> None:
        assert step.load is not None
        self._forget(step)
        self.document["measured"].append(_key(step) | {"session": self._session} | run)
        self._write()

    def audited(self, step: Step, audit: Row) -> None:
        self._forget(step)
        self.document.setdefault("audits", []).append(_key(step) | {"session": self._session} | audit)
        self._write()

    @property
    def _session(self) -> int:
        return len(self.document["sessions"]) - 1

    def compared(self, step: Step, samples: Row) -> None:
        """Keep what came out; once all arms have been compared, nobody needs the hashes of the reference's tokens."""
        self._forget(step)
        tokens = self.document["tokens"]
        tokens[step.arm.name] = samples
        if len(tokens) == len(self.document["plan"]["arms"]):
            self.document = shortened(self.document)
        self._write()

    def _lacks_hashes(self, arm: str) -> bool:
        """Whether other arms are still to be compared with this one, and its hashes are gone."""
        plan, tokens = self.document["plan"], self.document["tokens"]
        waiting = arm == plan["reference"] and len(tokens) < len(plan["arms"])
        return waiting and not all("hashes" in sample for sample in tokens[arm].values())

    def failed(self, step: Step, why: str) -> None:
        self._forget(step)
        self.document["failures"].append(_key(step) | {"error": why})
        self._write()

    def _forget(self, step: Step) -> None:
        self.document["failures"] = [each for each in self.document["failures"] if not _same(each, step)]

    def _write(self) -> None:
        """Write the file.

        Raises:
            PlanError: it can't be written; the message says where all steps are kept.
        """
        write_result(self.path, self.document)


def shortened(found: Document) -> Document:
    """A result without what no table has: figures that follow from others, and the hashes of the reference's tokens.

    The hashes are more than half of its compressed size. A run that is to compare another arm serves the reference's
    requests again. A result of anything else is unchanged.
    """
    if "served" not in found:
        return found
    return found | {"tokens": without(found["tokens"], {"hashes"}), "measured": without(found["measured"], _DERIVED)}


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
    """One row for each machine, load and arm that were measured, machines outermost.

    A row has the medians over passes with lowest and highest, `n`, and `ratios` by the keys of `SPEEDS`: an interval,
    or the reason for its absence. Arms are compared within a pass of a session, so within one run on one machine. A
    run of an arm whose session lacks the reference counts only where no session has it.
    """
    plan, rows = document["plan"], []
    for machine, sessions in enumerate(machines(document).values()):
        for load in plan["loads"]:
            runs = {arm["name"]: _runs(document, arm["name"], load["name"], sessions) for arm in plan["arms"]}
            reference = runs[plan["reference"]]
            for arm, found in runs.items():
                kept = beside(found, reference) or found
                if kept:
                    row = {"machine": machine, "load": load["name"], "rate": load["rate"], "arm": arm}
                    row |= _figures([*kept.values()]) | {"host_idle": _host_idle(document, arm, load["name"], sessions)}
                    rows.append(row | {"ratios": _ratios(plan, runs, arm)})
    return rows


def machines(document: Document) -> dict[str, list[int]]:
    """Sessions by the machine that they ran on, which is told by its hardware."""
    found: dict[str, list[int]] = {}
    for number, session in enumerate(document["sessions"]):
        for server in [*session["servers"].values()][:1]:
            hardware = server["facts"]["hardware"]
            name = ", ".join(_HARDWARE.get(fact, "{}").format(value) for fact, value in hardware.items())
            found.setdefault(name, []).append(number)
    return found


def starts(document: Document) -> list[Row]:
    """Every start of a server: `arm`, `seconds`, `caches`, and `beside`, the servers that started at once."""
    return [*document.get("starts", ())]


def engines(document: Document) -> dict[str, Row]:
    """The facts of the latest server of each arm."""
    return {arm: found["facts"] for session in document["sessions"] for arm, found in session["servers"].items()}


def unlike(document: Document, arm: str) -> dict[str, int]:
    """Requests of an arm whose tokens differ from the reference's, by kind: `greedy`, `seeded`."""
    return {kind: sample["different"] for kind, sample in document["tokens"][arm].items() if "different" in sample}


def faults(document: Document) -> list[str]:
    """Sentences on arms with the plugin whose tokens are not the reference's, where those of the control are."""
    plan, tokens = document["plan"], document["tokens"]
    control = plan["control"]
    noise = unlike(document, control) if control in tokens else {}
    unknown = "" if control in tokens else f"; run {control} too, which shows whether vLLM repeats its own tokens here"
    return [
        f"{arm['name']}: {different} {kind} requests have other tokens than {plan['reference']}'s{unknown}"
        for arm in plan["arms"]
        if arm["plugin"] == Plugin.ON.value and arm["name"] in tokens
        for kind, different in unlike(document, arm["name"]).items()
        if different and not noise.get(kind)
    ]


def _figures(found: list[Row]) -> Row:
    row: Row = {"n": len(found), "requests": sum(run["completed"] for run in found)}
    for latency in ("ttft", "tpot", "itl"):
        row[latency] = {share: _spread([run[latency][share] for run in found]) for share in found[0][latency]}
    for name in ("output_throughput", "request_goodput", "acceptance_length"):
        values = [run[name] for run in found if run.get(name) is not None]
        row[name] = _spread(values) if values else None
    return row


def _spread(values: list[float]) -> Row:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _runs(document: Document, arm: str, load: str, sessions: Collection[int]) -> Runs:
    return {
        (run["session"], run["pass"]): run
        for run in document["measured"]
        if (run["arm"], run["load"]) == (arm, load) and run["session"] in sessions
    }


def _host_idle(document: Document, arm: str, load: str, sessions: Collection[int]) -> float | None:
    """The latest share of time in which the GPU waited for the host, without the cost of recording."""
    found: list[float | None] = [
        audit["plain_idle"]
        for audit in document.get("audits", ())
        if (audit["arm"], audit["load"]) == (arm, load) and audit["session"] in sessions
    ]
    return found[-1] if found else None


def _ratios(plan: Row, runs: dict[str, Runs], arm: str) -> dict[str, Row]:
    reference, control = runs[plan["reference"]], runs.get(plan["control"])
    if arm == plan["reference"]:
        return {}
    found: dict[str, Row] = {}
    for name, speed in SPEEDS.items():
        ratio, why = _ratio(reference, runs[arm], speed), None
        if ratio is None:
            why = "fewer than two passes have both arms"
        elif arm != plan["control"] and control is not None:
            why = refusal(_ratio(reference, beside(control, runs[arm]), speed))
        found[name] = {"refused": why} if why or ratio is None else asdict(ratio)
    return found


def _ratio(reference: Runs, other: Runs, speed: Callable[[Row], float]) -> Interval | None:
    both = sorted(reference.keys() & other.keys())
    return paired_ratio([speed(reference[key]) for key in both], [speed(other[key]) for key in both])


def _key(step: Step) -> Row:
    return {"load": step.load.name if step.load else None, "arm": step.arm.name, "pass": step.number}


def _same(entry: Row, step: Step) -> bool:
    return _at(entry, _key(step))


def _at(entry: Row, place: Row) -> bool:
    return all(value in (ANY, entry[name]) for name, value in place.items())


def _identity(plan: dict[str, Any]) -> dict[str, Any]:
    """The fields that two runs must share to be one result."""
    return {name: value for name, value in plan.items() if name not in _FREE}
