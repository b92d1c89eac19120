"""A result as a table of strings, for the terminal and for the documents alike."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.arms import expected_length
from benchmarks.facts import captions
from benchmarks.summary import Row

_UNLIKE = 1.25
"""Factor by which a load of one short request can miss the requested acceptance length by chance."""
_ERROR = 240
"""Characters of a failure under a table."""


@dataclass(frozen=True, slots=True)
class Grid:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.head, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.head))
        return "\n".join(lines) + "\n"

    def table(self, title: str) -> Table:
        """The table for the terminal, which cuts off no number."""
        shown = Table(title=title)
        for name in self.head:
            shown.add_column(name, overflow="fold")
        for row in self.rows:
            shown.add_row(*map(escape, row))
        return shown


def grid(document: dict[str, Any]) -> Grid:
    """The table of a result: a row for each load and arm."""
    asynchronous = {turn["arm"]: turn["facts"]["async_scheduling"] for turn in document["turns"] if "facts" in turn}
    relative = f"speed, {document['plan']['reference']} = 1"
    some = any("ratio" in row for row in document["summary"])  # else the column would be empty
    head = ("load", "arm", "async", "ms a step", "tokens/s", "accepted", *[relative] * some, "turns x runs")
    return Grid(
        head,
        [
            (
                row["load"],
                row["arm"],
                "yes" if asynchronous[row["arm"]] else "no",
                step(row) if row["steady"] else "-",
                throughput(row),
                f"{row['acceptance_length']:.2f}",
                *[ratio(row)] * some,
                f"{row['turns']} x {row['runs'] / row['turns']:.0f}",
            )
            for row in document["summary"]
        ],
    )


def notes(document: dict[str, Any]) -> list[str]:
    """Notes on a result's table: refusals and the beginnings of failures, each once."""
    plan, found = document["plan"], dict[str, list[str]]()
    for row in document.get("summary", []):
        if "refused" in row:
            found.setdefault(row["refused"], []).append(row["load"])
    lines = [f"Ratios omitted for {', '.join(dict.fromkeys(loads))}: {why}." for why, loads in found.items()]
    if plan["keep"]:
        lines.append("Each arm kept one process for all its turns, so no interval covers differences between starts.")
    lines += captions({turn["arm"]: turn["facts"] for turn in document["turns"] if "facts" in turn})
    lines += _unlike_asked(document)
    errors = dict.fromkeys(turn["error"] for turn in document["turns"] if "error" in turn)
    return lines + [textwrap.shorten(error, _ERROR, placeholder=" ...") for error in errors]


def _unlike_asked(document: dict[str, Any]) -> list[str]:
    arms = {arm["name"]: arm for arm in document["plan"]["arms"] if arm["acceptance"] and arm["method"]}
    lines = []
    for row in document.get("summary", []):
        if (arm := arms.get(row["arm"])) is not None:
            asked, found = expected_length(arm["acceptance"]["share"], arm["draft_tokens"]), row["acceptance_length"]
            if not 1 / _UNLIKE < found / asked < _UNLIKE:
                lines.append(f"{row['arm']}, {row['load']}: accepted is {found:.2f}, and {asked:.2f} was asked for.")
    return lines


def ratio(row: Row) -> str:
    """A row's ratio with its interval, or a dash; the notes say why there is none."""
    if "ratio" not in row:
        return "-"
    found = row["ratio"]
    return f"{found['value']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def speed(row: Row) -> str:
    """The value by which a row is compared, and its unit."""
    return f"{step(row)} ms" if row["steady"] else f"{throughput(row)} tokens/s"


def step(row: Row) -> str:
    """Milliseconds a step, with their spread."""
    return _spread(row["step_ms"], digits=2)


def throughput(row: Row) -> str:
    """Tokens a second, with their spread."""
    return _spread(row["tokens_per_second"], digits=0)


def _spread(found: dict[str, float], digits: int) -> str:
    return "{:,.{digits}f} ({:,.{digits}f}-{:,.{digits}f})".format(*found.values(), digits=digits)
