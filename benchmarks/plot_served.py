"""The figure of a served plan: time per output token against the request rate, a line for each arm."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from benchmarks.serving.results import engines, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#8a8f98", "#3d7a35", "#0b6e8a", "#c2571a", "#6a4c93")
_MARKS = ("s", "D", "o", "^", "v")
_GRID = "#e7e9ee"
_TITLE = 84
"""Characters that fit into a line above the figure."""


def served_latencies(document: dict[str, Any], plt: Any) -> Figure:
    """TPOT p50 and p99 against the request rate: medians over passes, with bars from the lowest to the highest.

    Of a result of several machines, the one with the most rows is drawn.
    """
    rows = [row for row in summarise(document) if row["rate"] is not None]
    machine = statistics.mode(row["machine"] for row in rows) if rows else 0
    rows = [row for row in rows if row["machine"] == machine]
    figure: Figure
    figure, panels = plt.subplots(1, 2, figsize=(8.2, 3.6), layout="constrained")
    for panel, share in zip(panels, ("p50", "p99"), strict=True):
        for number, arm in enumerate(each["name"] for each in document["plan"]["arms"]):
            found = sorted((row["rate"], row["tpot"][share]) for row in rows if row["arm"] == arm)
            if not found:
                continue
            rates, values = zip(*((rate, spread) for rate, spread in found), strict=True)
            medians = [value["median"] for value in values]
            below = [value["median"] - value["low"] for value in values]
            above = [value["high"] - value["median"] for value in values]
            colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
            panel.errorbar(
                rates, medians, (below, above), label=arm, color=colour, marker=mark, markersize=5, capsize=2
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(rates_of(rows), [f"{rate:g}" for rate in rates_of(rows)])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_xlabel("requests/s")
        panel.set_ylabel(f"TPOT {share}, ms (lower is better)")
        panel.grid(axis="y", color=_GRID)
        panel.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=max(len(labels), 1), frameon=False, fontsize=9, loc="outside lower left")
    title = titled(document["plan"]["about"], engines(document).values())
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def rates_of(rows: list[dict[str, Any]]) -> list[float]:
    """The request rates of these rows, each once, ascending."""
    return sorted({row["rate"] for row in rows})


def titled(about: str, facts: Collection[dict[str, Any]]) -> str:
    """The lines above a figure: what its plan is about, and the releases and devices of its engines."""
    releases = ", ".join(dict.fromkeys(fact["vllm"] for fact in facts))
    devices = ", ".join(dict.fromkeys(fact["hardware"]["device"] for fact in facts))
    return f"{textwrap.fill(about, _TITLE)}\nvLLM {releases} on {devices}"
