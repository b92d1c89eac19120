"""A result as a table of strings, for the terminal and for the documents alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.arms import expected_length
from benchmarks.summary import Row

_UNLIKE = 1.25
"""A load of one short request can miss the acceptance length that was asked for by this factor, by chance."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As in a document."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.head, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.head))
        return "\n".join(lines) + "\n"


def grid(document: dict[str, Any]) -> Grid:
    """The table of a result: a row for each load and arm where arms are compared, else one for each arm."""
    return _compared(document) if document["plan"]["reference"] else _listed(document)


def notes(document: dict[str, Any]) -> list[str]:
    """What a reader has to know about a result's table: refusals, each once, and failures."""
    plan, found = document["plan"], dict[str, list[str]]()
    for row in document.get("summary", []):
        if "refused" in row:
            found.setdefault(row["refused"], []).append(row["load"])
    lines = [f"No ratio for {', '.join(dict.fromkeys(loads))}: {why}." for why, loads in found.items()]
    if plan["keep"]:
        lines.append("Each arm kept one process for all its turns: what differs between two starts is in no interval.")
    lines += _unlike_asked(document)
    return lines + [turn["error"] for turn in document["turns"] if "error" in turn]


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
    """A row's ratio with its interval, or why there is none."""
    if "ratio" not in row:
        return "not told" if "refused" in row else "-"
    found = row["ratio"]
    return f"{found['value']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def speed(row: Row) -> str:
    """The figure that a row is compared by, and its unit."""
    return f"{step(row)} ms" if row["steady"] else f"{throughput(row)} tokens/s"


def step(row: Row) -> str:
    """Milliseconds a step, with their spread."""
    return _spread(row["step_ms"], digits=2)


def throughput(row: Row) -> str:
    """Tokens a second, with their spread."""
    return _spread(row["tokens_per_second"], digits=0)


def _spread(found: dict[str, float], digits: int) -> str:
    return "{:,.{digits}f} ({:,.{digits}f}-{:,.{digits}f})".format(*found.values(), digits=digits)


def _compared(document: dict[str, Any]) -> Grid:
    asynchronous = {turn["arm"]: turn["facts"]["async_scheduling"] for turn in document["turns"] if "facts" in turn}
    relative = f"speed, {document['plan']['reference']} = 1"
    head = ("load", "arm", "async", "ms a step", "tokens/s", "accepted", relative, "turns x runs")
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
                ratio(row),
                f"{row['turns']} x {row['runs'] / row['turns']:.0f}",
            )
            for row in document["summary"]
        ],
    )


def _listed(document: dict[str, Any]) -> Grid:
    plan = document["plan"]
    loads = [load["name"] for load in plan["loads"]]
    labels = list(plan["arms"][0]["labels"]) or ["arm"]
    audited = any("audit" in turn for turn in document["turns"])
    rows = []
    for arm in plan["arms"]:
        cells = {row["load"]: row for row in document["summary"] if row["arm"] == arm["name"]}
        turn = next((turn for turn in document["turns"] if turn["arm"] == arm["name"]), None)
        if turn is None:
            continue
        rows.append(
            [
                *(arm["labels"].values() or [arm["name"]]),
                *(speed(cells[load]) if load in cells else "failed" for load in loads),
                f"{cells[loads[0]]['acceptance_length']:.2f}" if loads[0] in cells else "-",
                *([_waits(turn, loads[0])] if audited else []),
            ]
        )
    head = [*labels, *loads, "accepted", *(["critical waits a step"] if audited else [])]
    return Grid(head, rows)


def _waits(turn: dict[str, Any], load: str) -> str:
    """Waits a step for which the device stood still, and the share of time that the host let it, by the audit."""
    report = turn.get("audit", {}).get(load)
    if report is None:
        return "-"
    critical = sum(cause["per_step"] for cause in report["causes"] if cause["place"] == "critical")
    idle = f"; idle {report['gpu']['host_idle']:.3f}" if report["gpu"] else ""
    return f"{critical:.2f}{idle}"
