"""Result files, written after every turn, so that a run can be interrupted and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Plan, PlanError
from benchmarks.summary import SPREADS, summarise
from vllm_async_spec.cli.outputs import keep_elsewhere
from vllm_async_spec.compat.report import compact_json

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / ".cache" / "figures"

Document = dict[str, Any]
Turn = dict[str, Any]


class ResultFile:
    """The result of one plan."""

    def __init__(self, path: Path, plan: Plan, *, fresh: bool = False) -> None:
        """Open the result file of `plan`, or start a new one, which is written with the first turn.

        Args:
            path: of the file.
            plan: what is measured.
            fresh: start a new one, also where there is a file.

        Raises:
            PlanError: the file holds the result of another plan.
        """
        self.path = path
        declared = json.loads(json.dumps(asdict(plan)))  # as it reads back from a file
        if path.is_file() and not fresh:
            self.document = read_result(path)
            if _identity(self.document["plan"]) != _identity(declared):
                raise PlanError(
                    f"{path} is the result of another plan or of an older version; move the file, or give a --name"
                )
            self.document["plan"] = declared
        else:
            self.document = {"schema": SCHEMA, "plan": declared, "commands": [], "turns": []}

    @property
    def turns(self) -> list[Turn]:
        """Turns that have run, including failed turns."""
        turns: list[Turn] = self.document["turns"]
        return turns

    def holds(self, number: int, arm: Arm, *, failed: bool) -> bool:
        """Whether the file has the turn of `arm` in pass `number`; with `failed`, a failed turn counts."""
        return any(
            turn["pass"] == number and turn["arm"] == arm.name and (failed or "error" not in turn)
            for turn in self.turns
        )

    def add(self, turn: Turn, command: str) -> None:
        """Add a turn, replacing an earlier attempt at it, and write the file.

        Raises:
            PlanError: the file can't be written; the message says where all turns are kept.
        """
        same = (turn["pass"], turn["arm"])
        self.document["turns"] = [kept for kept in self.turns if (kept["pass"], kept["arm"]) != same] + [turn]
        _drop_single_runs(self.turns)
        if command not in self.document["commands"]:
            self.document["commands"].append(command)
        self.document["summary"] = summarise(self.document)
        partial = self.path.with_suffix(".partial")
        measured = {name: value for name, value in self.document.items() if name != "summary"}
        text = compact_json(rounded(measured))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text)
            os.replace(partial, self.path)
        except OSError as error:
            kept = keep_elsewhere(self.path, text)
            raise PlanError(f"{self.path} can't be written ({error.strerror}); {kept}") from None


def read_result(path: Path) -> Document:
    """The content of a result file, with its `summary`, which is made from the turns and not stored.

    Raises:
        PlanError: this release can't read the file.
    """
    try:
        document: Document = json.loads(path.read_text())
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


def result_files(folder: Path = RESULTS) -> Sequence[Path]:
    """Result files of plans in a folder, ordered by name."""
    return [path for path in sorted(folder.glob("*.json")) if "schema" in json.loads(path.read_text())]


def read_trace(path: Path) -> Document | None:
    """A file of `python -m benchmarks trace`; None if the file is something else."""
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) and "trace" in found else None


def trace_files(folder: Path = RESULTS) -> Sequence[Path]:
    """Trace files in a folder, ordered by name."""
    return [path for path in sorted(folder.glob("*.json")) if read_trace(path) is not None]


def figure_of(path: Path, form: str = "svg") -> Path:
    """Where `plot` draws the figure of a result file: in .cache for one of this repository's own, else beside it."""
    folder = FIGURES if path.resolve().parent == RESULTS.resolve() else path.parent
    return folder / f"{path.stem}.{form}"


def _drop_single_runs(turns: Sequence[Turn]) -> None:
    """Drop the single runs of each arm that has several turns of a load, and what no spread needs of the others."""
    loads: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        for name, load in turn.get("loads", {}).items():
            loads.setdefault((turn["arm"], name), []).append(load)
    for same in loads.values():
        for load in same:
            runs = load.pop("runs", None)
            if len(same) == 1 and runs is not None:
                load["runs"] = [{name: run[name] for name in SPREADS} for run in runs]


def _identity(plan: dict[str, Any]) -> dict[str, Any]:
    """The fields that two runs must share to be one result; the number and length of turns may differ."""
    return {name: plan[name] for name in ("name", "arms", "loads", "reference", "control", "keep")}


def rounded(value: Any) -> Any:
    """The same with six digits of each float, more than any clock here resolves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
