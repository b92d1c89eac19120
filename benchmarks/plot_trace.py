"""The timeline of a technique: a few steps with the wait above the same few without it, on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.tracing import CALL, COPIES, CRITICAL, KERNELS, OVERLAPPED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PYTHON = "python"
_KINDS = {
    _PYTHON: ("#e7e9ee", "host, in Python"),
    CALL: ("#8a8f98", "host, in a CUDA call"),
    CRITICAL: ("#c0392b", "host waits until the GPU is idle"),
    OVERLAPPED: ("#e8b27c", "host waits, the GPU has work"),
    KERNELS: ("#0b6e8a", "kernels"),
    COPIES: ("#6a4c93", "copies"),
}
"""Colour and legend text."""
_FAINT = "#8a8f98"
_HALF = 0.36
_FEW = 60
"""If a row has at most this many blocks of a kind, each is drawn wide enough to be seen."""
_SEEN = 1 / 600
"""Smallest visible width, as a share of the axis."""


def timeline(found: dict[str, Any], plt: Any) -> Figure:
    """The figure of a file that `tracing` wrote, drawn with pyplot."""
    arms = found["arms"]
    rows = [len(arm["rows"]) for arm in arms.values()]
    figure: Figure
    figure, panels = plt.subplots(
        len(arms),
        1,
        sharex=True,
        squeeze=False,
        figsize=(10, 1.6 + 0.36 * sum(rows) + 0.45 * len(arms)),
        height_ratios=[count + 0.4 for count in rows],
        layout="constrained",
    )
    longest = max(arm["us"] for arm in arms.values())
    for panel, (name, arm) in zip(panels[:, 0], arms.items(), strict=True):
        _arm(panel, name, arm, seen_us=_SEEN * longest)
    panels[-1, 0].set_xlim(0, longest / 1e3)
    panels[-1, 0].set_xlabel("ms; each line marks where the host begins a step")
    figure.suptitle(_title(found), x=0.01, ha="left", fontsize=11)
    _legend(figure, arms)
    return figure


def _arm(panel: Axes, name: str, arm: dict[str, Any], seen_us: float) -> None:
    for place, row in enumerate(arm["rows"]):
        if row["name"] == "host":
            _blocks(panel, place, _PYTHON, [(0, arm["us"])])
        for kind, blocks in row["blocks"].items():
            least = seen_us if len(blocks) <= _FEW else 0
            _blocks(panel, place, kind, [(start, max(length, least)) for start, length in blocks])
    for step in arm["steps_us"]:
        panel.axvline(step / 1e3, color=_FAINT, linewidth=0.7, zorder=3)
    panel.set_yticks(range(len(arm["rows"])), [row["name"] for row in arm["rows"]])
    panel.set_ylim(len(arm["rows"]) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.set_title(
        f"{name}: {arm['step_us'] / 1e3:.2f} ms a step, GPU busy {arm['gpu_busy']:.0%}, "
        f"{arm['critical_waits']:.2f} critical waits a step",
        loc="left",
        fontsize=10,
    )


def _blocks(panel: Axes, place: int, kind: str, blocks: Sequence[Sequence[float]]) -> None:
    """Draw the blocks as one path, because a file of a thousand rectangles is several times as large."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners, codes = [], []
    for start, length in blocks:
        a, b = start / 1e3, (start + length) / 1e3
        corners += [(a, place - _HALF), (b, place - _HALF), (b, place + _HALF), (a, place + _HALF), (a, place - _HALF)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    panel.add_patch(PathPatch(Outline(corners, codes), facecolor=_KINDS[kind][0], linewidth=0))


def _legend(figure: Figure, arms: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    there = {_PYTHON, *(kind for arm in arms.values() for row in arm["rows"] for kind in row["blocks"])}
    handles = [Patch(color=colour, label=words) for kind, (colour, words) in _KINDS.items() if kind in there]
    figure.legend(handles=handles, ncols=3, frameon=False, fontsize=9, loc="outside lower left")


def _title(found: dict[str, Any]) -> str:
    joined = f", blocks less than {found['join_us']:.1f} µs apart are joined" if found["join_us"] > 1 else ""
    return (
        f"{found['title']}: {found['model']}, batch {found['batch']}\n"
        f"transformers {found['transformers']} on {found['device']}, while recorded{joined}"
    )
