"""How long arms take to start: with cold caches, with those that another arm warmed, and with warm ones."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.present import Grid
from benchmarks.serving.results import starts

Row = dict[str, Any]
CACHES = {"cold": "cold caches", "shared": "caches that another arm warmed", "warm": "warm caches"}


def starts_of(document: Mapping[str, Any]) -> list[Row]:
    """Every start that a result has: of servers, until one answers; or of engines, the time of `vllm.LLM`.

    Each has `arm`, `seconds`, `caches`, and `beside`, the number that started at once.
    """
    if "served" in document:
        return starts(dict(document))
    kept = document["plan"].get("keep")  # then an arm's turns share one process, and its start
    found = {
        (turn["arm"], turn["facts"]["start_seconds"], None if kept else turn["pass"]): turn["facts"]
        for turn in document["turns"]
        if turn.get("facts", {}).get("caches")
    }
    return [
        {"arm": arm, "seconds": took, "caches": each["caches"], "beside": each.get("beside", 1)}
        for (arm, took, _), each in found.items()
    ]


def starts_grid(documents: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row for each arm of each result, by the result's name, that says how its starts went."""
    head = ("result", "arm", *(f"s, {words}" for words in CACHES.values()), "warm, more than stock")
    rows = []
    for name, document in documents.items():
        found = starts_of(document)
        stock = _warm(found, document["plan"]["reference"])
        for arm in (each["name"] for each in document["plan"]["arms"]):
            mine = [start for start in found if start["arm"] == arm]
            if mine:
                warm = _warm(mine, arm)
                cells = [_cell([start for start in mine if start["caches"] == state]) for state in CACHES]
                more = "-" if stock is None or warm is None else f"{warm - stock:+.1f} s"
                rows.append((name, arm, *cells, more))
    return Grid(head, rows)


def _warm(found: Sequence[Row], arm: str) -> float | None:
    """Median seconds of an arm's starts with warm caches and nothing beside."""
    wanted = {"arm": arm, "caches": "warm", "beside": 1}
    alone = [start["seconds"] for start in found if wanted.items() <= start.items()]
    return statistics.median(alone) if alone else None


def _cell(found: Sequence[Row]) -> str:
    """Medians, and lowest and highest, by how many started at once."""
    parts = []
    for beside in sorted({start["beside"] for start in found}):
        values = [start["seconds"] for start in found if start["beside"] == beside]
        together = "" if beside == 1 else f", {beside} at once"
        spread = f"{min(values):.0f}-{max(values):.0f}, n = {len(values)}" if len(values) > 1 else "n = 1"
        parts.append(f"{statistics.median(values):.0f} ({spread}{together})")
    return "; ".join(parts) or "-"
