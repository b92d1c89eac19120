"""How long arms take to start: with cold caches, with those that another arm warmed, and with warm ones."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.present import Grid
from benchmarks.serving.results import starts

Row = dict[str, Any]
CACHES = {"warm": "warm", "shared": "warmed by another arm", "cold": "cold"}
"""States of the caches, in the table's order, and its words."""
ARMS = ("stock", "noop", "plugin", "FLASH_ATTN")
"""Arms that have a column."""


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
    """A row for starts of one result that are alike: with caches in the same state, and as many at once.

    Warm caches come first, and results in the order given. Arms without a column, as of experiments, are left out.
    """
    alike: dict[tuple[int, int, int], dict[str, list[float]]] = {}
    for number, document in enumerate(documents.values()):
        for start in starts_of(document):
            place = [*CACHES].index(start["caches"]), number, start["beside"]
            alike.setdefault(place, {}).setdefault(start["arm"], []).append(start["seconds"])
    head = ("result", "caches", "at once", *(f"{arm}, s" for arm in ARMS), "plugin, more than stock")
    names, words = [*documents], [*CACHES.values()]
    return Grid(
        head,
        [
            (names[number], words[state], str(beside), *(_cell(arms.get(arm, ())) for arm in ARMS), _more(arms))
            for (state, number, beside), arms in sorted(alike.items())
        ],
    )


def _more(arms: Mapping[str, Sequence[float]]) -> str:
    if not {"stock", "plugin"} <= arms.keys():
        return "-"
    return f"{statistics.median(arms['plugin']) - statistics.median(arms['stock']):+.1f} s"


def _cell(values: Sequence[float]) -> str:
    """The median, and of several values the lowest and highest."""
    if len(values) < 2:
        return "".join(f"{value:.0f}" for value in values) or "-"
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f}, n = {len(values)})"
