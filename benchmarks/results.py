"""Result files, written after every turn, so that a run can be interrupted and resumed."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Plan, PlanError
from benchmarks.stored import exists, files, read_json, rounded
from benchmarks.summary import SPREADS, session_of, summarise
from vllm_async_spec.cli.outputs import keep_elsewhere
from vllm_async_spec.compat.json_text import compact_json

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / ".cache" / "figures"

Document = dict[str, Any]
Turn = dict[str, Any]


class ResultFile:
    """The result of one plan."""

    def __init__(self, path: Path, plan: Plan, *, fresh: bool = False) -> None:
        """Open the result file of `plan`, or start a new one, which is written with the first turn.

        Raises:
            PlanError: the file holds the result of another plan, or no result at all.
        """
        self.path = path
        empty: Document = {"schema": SCHEMA, "commands": [], "turns": []}
        self.document = opened(path, asdict(plan), empty, read_result, _identity, fresh=fresh)
        self._session = 0

    @property
    def turns(self) -> list[Turn]:
        """Turns that have run, including failed turns."""
        turns: list[Turn] = self.document["turns"]
        return turns

    def begin(self) -> None:
        """Begin a session: one run of the command. Only turns of one session are compared."""
        self._session = 1 + max((session_of(turn) for turn in self.turns), default=-1)

    def holds(self, number: int, arm: Arm, beside: Collection[str], *, failed: bool) -> bool:
        """Whether the file has the turn of `arm` in pass `number`; with `failed`, a failed turn counts.

        A turn counts if its session has the arms `beside` in the same pass too.
        """
        here = [turn for turn in self.turns if turn["pass"] == number]
        gone = {turn["arm"] for turn in here if "error" in turn} if failed else set()
        found: dict[int, set[str]] = {}
        for turn in here:
            if "error" not in turn:
                found.setdefault(session_of(turn), set()).add(turn["arm"])
        return arm.name in gone or any({arm.name, *beside} - gone <= arms for arms in found.values())

    def add(self, turn: Turn, command: str) -> None:
        """Add a turn of this session, in place of earlier ones that failed, and write the file.

        Raises:
            PlanError: the file can't be written; the message says where all turns are kept.
        """
        turn = turn | ({"session": self._session} if self._session else {})
        same = (turn["pass"], turn["arm"])
        kept = [
            each
            for each in self.turns
            if (each["pass"], each["arm"]) != same or not ("error" in each or session_of(each) == self._session)
        ]
        self.document["turns"] = [*kept, turn]
        _drop_single_runs(self.turns)
        if command not in self.document["commands"]:
            self.document["commands"].append(command)
        self.document["summary"] = summarise(self.document)
        write_result(self.path, {name: value for name, value in self.document.items() if name != "summary"})


def opened(
    path: Path,
    plan: Mapping[str, Any],
    empty: Document,
    read: Callable[[Path], Document],
    identity: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    fresh: bool,
) -> Document:
    """The document of a result file of `plan`: the file's, or with `fresh` or without a file a new one.

    Args:
        empty: a new document, without the plan.
        read: reads the file; raises PlanError if the file is no such result.
        identity: the fields of a plan that two runs must share to be one result.
        fresh: begin anew; a file that is no such result is kept nevertheless.

    Raises:
        PlanError: the file holds the result of another plan, or no such result.
    """
    declared = json.loads(json.dumps(plan))  # as it reads back from a file
    found = read(path) if exists(path) else None
    if found is None or fresh:
        return {**empty, "plan": declared}
    if identity(found["plan"]) != identity(declared):
        raise PlanError(f"{path} is the result of another plan or of an older version; move the file, or give a --name")
    return found | {"plan": declared}


def read_result(path: Path) -> Document:
    """The content of a result file, with its `summary`, which is made from the turns and not stored.

    Raises:
        PlanError: this release can't read the file.
    """
    try:
        document: Document = read_json(path)
        schema = document["schema"]
        if schema == SCHEMA:
            document["summary"] = summarise(document)
    except (ValueError, LookupError, TypeError):
        raise PlanError(
            f"{path} is not a result of `python -m benchmarks run`; move the file, or name another"
        ) from None
    if schema != SCHEMA:
        raise PlanError(f"{path} has schema {schema!r}; this version reads only schema {SCHEMA}")
    return document


def write_result(path: Path, document: Document) -> None:
    """Write a result whole or not at all, with five digits of each float.

    Raises:
        PlanError: the file can't be written; the message says where the result is kept.
    """
    partial, text = path.with_suffix(".partial"), compact_json(rounded(document, 5))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        kept = keep_elsewhere(path, text)
        raise PlanError(f"{path} can't be written ({error.strerror}); {kept}") from None


def result_files(folder: Path = RESULTS) -> Sequence[Path]:
    """Result files of plans in a folder, ordered by name."""
    return [path for path in files(folder) if "schema" in read_json(path)]


def read_trace(path: Path) -> Document | None:
    """A file of `python -m benchmarks trace`; None if the file is something else."""
    found = read_json(path)
    return found if isinstance(found, dict) and "trace" in found else None


def trace_files(folder: Path = RESULTS) -> Sequence[Path]:
    """Trace files in a folder, ordered by name."""
    return [path for path in files(folder) if read_trace(path) is not None]


def figure_of(path: Path, form: str = "svg") -> Path:
    """Where `plot` draws the figure of a result file: in .cache for one of this repository's own, else beside it."""
    folder = FIGURES if path.resolve().parent == RESULTS.resolve() else path.parent
    return folder / f"{path.stem}.{form}"


def _drop_single_runs(turns: Sequence[Turn]) -> None:
    """Drop the single runs of each arm that has several turns of a load, and what no spread needs of the others.

    The runs of a single turn become two: their lowest values, and their highest.
    """
    loads: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        for name, load in turn.get("loads", {}).items():
            loads.setdefault((turn["arm"], name), []).append(load)
    for same in loads.values():
        for load in same:
            runs = load.pop("runs", None)
            if len(same) == 1 and runs is not None:
                load["runs"] = [{name: end(run[name] for run in runs) for name in SPREADS} for end in (min, max)]


def _identity(plan: dict[str, Any]) -> dict[str, Any]:
    """The fields that two runs must share to be one result; the number and length of turns may differ."""
    return {name: plan[name] for name in ("name", "arms", "loads", "reference", "control", "keep")}
