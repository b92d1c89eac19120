"""One figure for each result: ratios with intervals, latencies of servers by request rate, or a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plot_served import served_latencies, titled
from benchmarks.plot_trace import timeline
from benchmarks.present import ratio
from benchmarks.summary import Row, pass_ratios

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT, _BAND, _RATIO, _OMITTED = "#1a1a1a", "#8a8f98", "#e7e9ee", "#0b6e8a", "#c2571a"


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the figure of a result or a trace into `path`, SVG or PNG by its name."""
    _save(path, lambda plt: _figure_of(document, plt))


def _figure_of(document: dict[str, Any], plt: Any) -> Figure:
    if "trace" in document:
        return timeline(document, plt)
    if "served" in document:
        return served_latencies(document, plt)
    return _compared(document, plt)


def _save(path: Path, make: Callable[[Any], Figure]) -> None:
    """Write the figure that `make` draws with pyplot, in this project's style; the same drawing gives the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    settings: dict[str, Any] = {
        "font.size": 10,
        "axes.edgecolor": _FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "vllm-async-spec",
    }
    with plt.rc_context(settings):
        figure = make(plt)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata, facecolor="white")
        plt.close(figure)


def _compared(document: dict[str, Any], plt: Any) -> Figure:
    """A row for each load; the band is the interval of the noop arm's ratio, which is noise."""
    plan = document["plan"]
    loads = [load["name"] for load in plan["loads"]]
    arms = [arm["name"] for arm in plan["arms"] if arm["name"] not in (plan["reference"], plan["control"])]
    figure: Figure
    figure, axes = plt.subplots(figsize=(8.2, 1.7 + 0.62 * len(loads) * len(arms)), layout="constrained")
    rows = {(row["load"], row["arm"]): row for row in document["summary"]}
    ticks = []
    for place, (load, arm) in enumerate((load, arm) for load in loads for arm in arms):
        row = rows.get((load, arm))
        ticks.append(load if len(arms) == 1 else f"{load}, {arm}")
        if row is None:
            continue
        _band(axes, place, rows.get((load, plan["control"])))
        if "ratio" in row:
            _interval(axes, place, row, pass_ratios(document, load, arm))
        note = ratio(row) if "ratio" in row else "ratio omitted"
        colour = _INK if "ratio" in row else _OMITTED
        axes.annotate(
            note, (1.01, place), xycoords=("axes fraction", "data"), va="center", color=colour, annotation_clip=False
        )
    axes.use_sticky_edges = False
    axes.margins(x=0.06)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.set_ylim(len(ticks) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"speed, {plan['reference']} = 1 (right of the line is faster)")
    facts = [turn["facts"] for turn in document["turns"] if "facts" in turn]
    axes.set_title(titled(plan["about"], facts), loc="left", fontsize=11)
    _legend(figure, plan)
    return figure


def _band(axes: Axes, place: int, control: Row | None) -> None:
    if control is None or "ratio" not in control:
        return
    found = control["ratio"]
    axes.barh(place, found["high"] - found["low"], left=found["low"], height=0.72, color=_BAND, zorder=0)


def _interval(axes: Axes, place: int, row: Row, passes: Sequence[float]) -> None:
    found = row["ratio"]
    axes.plot(passes, [place + 0.24] * len(passes), "o", color=_FAINT, markersize=3.5, zorder=2)
    axes.plot((found["low"], found["high"]), (place, place), color=_RATIO, linewidth=2.2, zorder=3)
    axes.plot(found["value"], place, "o", color=_RATIO, markersize=7, zorder=4)


def _legend(figure: Figure, plan: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], color=_RATIO, marker="o", linewidth=2.2, label="ratio, 95 % interval"),
        Line2D([], [], color=_FAINT, marker="o", linestyle="", markersize=3.5, label="each pass"),
    ]
    if plan["control"]:
        handles.append(Patch(color=_BAND, label=f"interval of {plan['control']}: noise"))
    figure.legend(handles=handles, ncols=3, frameon=False, fontsize=9, loc="outside lower left")
