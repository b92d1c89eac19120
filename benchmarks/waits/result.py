"""Result files of the cases: one for each release, runner and shape, written after every case."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arms import Plugin
from benchmarks.results import write_result
from benchmarks.stored import exists, files, read_json
from benchmarks.waits.cases import WaitsError

MARK = "feature_waits"
"""Key by which these files are told from other results; its value is the format's version."""
_VERSION = 1
PATTERN = "feature-waits-*.json"

Found = dict[str, Any]
"""The result of one case: `turns` of it and of its reference, with `audit`; or a reason under a key of `REASONS`."""
REASONS = ("refused", "lacks", "failed")


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one release, runner and shape."""

    release: str
    runner: str
    shape: str
    cpu: bool = False

    @property
    def name(self) -> str:
        """Its name on the command line and in file names."""
        return f"{self.release}-{self.runner}-{self.shape}"


GROUPS = tuple(
    Group(release, runner, shape)
    for shape in ("1b", "8b")
    for release, runner in (("0.32.0", "V2"), ("0.26.0", "V2"), ("0.26.0", "V1"))
)


class WaitsResult:
    """The result file of one group."""

    def __init__(self, folder: Path, group: Group, plugin: Plugin) -> None:
        """Open the file of `group` in `folder`, or begin a new one, which is written with the first case.

        Raises:
            WaitsError: the file holds something else.
        """
        suffix = "" if plugin is Plugin.NOOP else f"-{plugin.value}"
        self.path = folder / f"feature-waits-{group.name}{suffix}.json"
        about = {"release": group.release, "runner": group.runner, "shape": group.shape, "plugin": plugin.value}
        self.document: dict[str, Any] = {MARK: _VERSION, **about, "commands": [], "engines": {}, "cases": {}}
        if exists(self.path):
            found = read_waits(self.path)
            if found is None or {name: found.get(name) for name in about} != about:
                raise WaitsError(f"{self.path} is no result of these cases; move the file, or give another --out")
            self.document = found

    @property
    def cases(self) -> dict[str, Found]:
        """What was found, by case."""
        cases: dict[str, Found] = self.document["cases"]
        return cases

    def holds(self, case: str, *, retry: bool) -> bool:
        """Whether the case needs no further run: it is complete or refused, or it failed and `retry` is not set.

        What the environment lacked may be there now, so such a case runs again.
        """
        found = self.cases.get(case)
        if found is None:
            return False
        if "failed" in found:
            return not retry
        return "refused" in found or "audit" in found

    def describe(self, engine: str, facts: dict[str, Any]) -> None:
        """Keep the facts of an engine, which are written with its next case.

        Raises:
            WaitsError: other engines of the file ran on another device.
        """
        engines = self.document["engines"]
        before, now = ({each["hardware"]["device"] for each in of} for of in (engines.values(), [facts]))
        if before - now:
            raise WaitsError(
                f"{self.path} is of {', '.join(before)}, and this machine has {', '.join(now)}; give another --out"
            )
        engines[engine] = facts

    def add(self, case: str, found: Found, command: str) -> None:
        """Add or replace the result of a case, and write the file.

        Raises:
            PlanError: the file can't be written; the message says where the result is kept.
        """
        self.cases[case] = found
        if command not in self.document["commands"]:
            self.document["commands"].append(command)
        write_result(self.path, self.document)


def read_waits(path: Path) -> dict[str, Any] | None:
    """The content of a result file of cases; None if the file is something else."""
    try:
        found = read_json(path)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get(MARK) == _VERSION else None


def published(folder: Path) -> list[dict[str, Any]]:
    """Results that the page shows, in the order of `GROUPS`: stock's code paths on a GPU, so none of a CPU."""
    order = [(group.shape, group.release, group.runner) for group in GROUPS]
    found = [each for path in files(folder, PATTERN) if (each := read_waits(path)) is not None]
    chosen = [
        each
        for each in found
        if each["plugin"] == Plugin.NOOP.value and (each["shape"], each["release"], each["runner"]) in order
    ]
    return sorted(chosen, key=lambda each: order.index((each["shape"], each["release"], each["runner"])))


def medians(turns: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Median milliseconds a step of each turn; a turn's runs are those of `WaitsEngine.time_case`."""
    return [statistics.median(run[0] for run in turn) for turn in turns]


def step_ms(turns: Sequence[Sequence[Sequence[float]]]) -> float:
    """Median milliseconds a step of all runs."""
    return statistics.median(run[0] for turn in turns for run in turn)


def ratio(found: Found) -> tuple[float, float, float] | None:
    """A case's step time over its reference's, and that of the lower and of the higher pair of turns."""
    if not found.get("reference"):
        return None
    pairs = [case / plain for case, plain in zip(medians(found["turns"]), medians(found["reference"]), strict=True)]
    return step_ms(found["turns"]) / step_ms(found["reference"]), min(pairs), max(pairs)
