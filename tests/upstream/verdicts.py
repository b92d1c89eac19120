"""Comparing what two arms recorded: pure functions of the records."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Result = tuple[str, str]
"""Outcome of a case and what its error or skip said."""

MISSING: Result = ("not run", "")


@dataclass
class FileRecord:
    cases: dict[str, Result] = field(default_factory=dict)
    ended: str = "no record"
    plugin: list[dict[str, str] | None] = field(default_factory=list)
    """State of the patches, as pytest started and as it ended."""

    @property
    def broke_off(self) -> bool:
        return not self.ended.startswith("exit ") or len(self.plugin) < 2


@dataclass(frozen=True)
class Difference:
    case: str
    stock: tuple[Result, ...]
    plugin: tuple[Result, ...]


def read_record(path: Path) -> FileRecord:
    record = FileRecord()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line) if line else {}
        except ValueError:
            continue  # of a process that was killed while it wrote
        if "case" in entry:
            record.cases[entry["case"]] = (entry["outcome"], entry["detail"])
        elif "plugin" in entry:
            record.plugin.append(entry["plugin"])
        elif "ended" in entry:
            record.ended = entry["ended"]
    return record


def results(record: FileRecord, file: str) -> dict[str, Result]:
    """Cases and how the file's process ended, which counts as a case of its own."""
    return {**record.cases, file + " (process)": (record.ended, "")}


def differing(file: str, stock: Sequence[FileRecord], plugin: Sequence[FileRecord]) -> list[Difference]:
    """Cases that the plugin gives a result that stock never gave.

    What an arm that broke off did not get to can't be compared: how far one gets is a matter of time.
    """
    both_broke_off = all(record.broke_off for record in (*stock, *plugin))
    found = [[results(record, file) for record in arm] for arm in (stock, plugin)]
    found_differences = []
    for case in dict.fromkeys(case for arm in found for run in arm for case in run):
        ours, theirs = (tuple(dict.fromkeys(run.get(case, MISSING) for run in arm)) for arm in (found[1], found[0]))
        if both_broke_off and MISSING in (*ours, *theirs):
            continue
        if set(ours) - set(theirs):
            found_differences.append(Difference(case, theirs, ours))
    return found_differences


def refusals_of_plugin(file: str, record: FileRecord, expected: Iterable[str]) -> list[str]:
    """Why this process is no test of the plugin: sentences, none where every expected patch is applied."""
    if not record.plugin:
        return [f"{file}: its process recorded nothing ({record.ended})"]
    found = []
    for state in record.plugin:
        if state is None:
            return [f"{file}: vLLM did not load the plugin"]
        refused = sorted(name for name, what in state.items() if what == "refused")
        lacking = sorted(name for name in expected if state.get(name) != "applied")
        if refused or lacking:
            found.append(f"{file}: not applied {', '.join(lacking) or 'none'}; refused {', '.join(refused) or 'none'}")
    return list(dict.fromkeys(found))


def refusals_of_stock(file: str, record: FileRecord) -> list[str]:
    if not record.plugin:
        return [f"{file}: its process recorded nothing ({record.ended})"]
    return [f"{file}: the plugin is loaded in stock vLLM"] if any(each is not None for each in record.plugin) else []


def too_few(passed: Mapping[str, int], least: Mapping[str, int]) -> list[str]:
    """Directories of which fewer cases passed in both arms than must, so that nothing passes for being empty."""
    return [
        f"{directory}: {passed.get(directory, 0)} cases passed in both, at least {least[directory]} must"
        for directory in least
        if passed.get(directory, 0) < least[directory]
    ]


def counted(file: str, stock: FileRecord, plugin: FileRecord) -> Counter[str]:
    counts: Counter[str] = Counter()
    for case in dict.fromkeys((*stock.cases, *plugin.cases)):
        one, other = (record.cases.get(case, MISSING)[0] for record in (stock, plugin))
        if one != other:
            counts["unlike"] += 1
        elif one == "not collected":
            counts["not collected"] += 1
        else:
            kind = "failed" if "failed" in one or one == "xpassed" else one
            counts["passed" if kind == "passed" else "skipped" if kind in ("skipped", "xfailed") else "failed"] += 1
    return counts
