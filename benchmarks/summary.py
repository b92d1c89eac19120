"""Rows from turns: medians, spreads, and ratios unless noise forbids them."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from benchmarks.arms import PlanError
from benchmarks.statistics import CONFIDENCE, Interval, paired_ratio, refusal

Row = dict[str, Any]
Place = tuple[int, int]
"""Session and pass of a turn."""
Run = TypeVar("Run")
SPREADS = ("step_ms", "tokens_per_second")
"""Figures of which a row gives the spread."""


def summarise(document: dict[str, Any]) -> list[Row]:
    """One row for each load and arm, loads outermost, of sessions that have the reference too.

    Arms are compared by steps a second for a steady load, and by tokens a second for other loads. A row has `ratio`, or
    `refused` with the reason for its absence.
    """
    plan = document["plan"]
    rows = []
    for load in plan["loads"]:
        steady = load["requests"] == load["running"]
        speeds = {
            arm["name"]: _by_pass(document["turns"], arm["name"], load["name"], steady=steady) for arm in plan["arms"]
        }
        for arm in plan["arms"]:
            found = [
                (session_of(turn), turn["loads"][load["name"]])
                for turn in document["turns"]
                if turn["arm"] == arm["name"] and load["name"] in turn.get("loads", {})
            ]
            beside = {session for session, _ in speeds.get(plan["reference"], ())}
            if kept := [each for session, each in found if session in beside] or [each for _, each in found]:
                row = {"load": load["name"], "steady": steady, "arm": arm["name"]} | _figures(kept)
                rows.append(row | _comparison(document, speeds, arm["name"]))
    return rows


def against(document: dict[str, Any], other: str) -> dict[str, Any]:
    """`document` with its arms compared with `other`; ratios refused for noise to its own reference stay refused.

    Raises what `with_reference` raises.
    """
    changed = with_reference(document, other)
    refused = {row["load"]: row["refused"] for row in document["summary"] if "refused" in row}
    changed["summary"] = summarise(changed)
    for row in changed["summary"]:
        if "ratio" in row and row["load"] in refused:
            del row["ratio"]
            row["refused"] = refused[row["load"]]
    return changed


def with_reference(document: dict[str, Any], other: str) -> dict[str, Any]:
    """`document` with `other` as its plan's reference, and no control.

    Raises:
        PlanError: the document has no such arm.
    """
    plan = document["plan"]
    if other not in (arms := [arm["name"] for arm in plan["arms"]]):
        raise PlanError(f"{plan['name']} has no arm {other!r}; it has {', '.join(arms)}")
    return document | {"plan": plan | {"reference": other, "control": None}}


def pass_ratios(document: dict[str, Any], load: str, arm: str) -> list[float]:
    """The ratio of an arm's speed to the reference's, in each pass that has both."""
    steady = next(each["requests"] == each["running"] for each in document["plan"]["loads"] if each["name"] == load)
    names = (document["plan"]["reference"], arm)
    reference, other = (_by_pass(document["turns"], name, load, steady=steady) for name in names)
    return [other[number] / reference[number] for number in sorted(reference.keys() & other.keys())]


def _figures(found: list[dict[str, Any]]) -> Row:
    """Medians over turns; with one turn the spread is that of its runs."""
    row: Row = {"turns": len(found), "runs": sum(turn["n"] for turn in found)}
    for name in SPREADS:
        values = [turn[name] for turn in found]
        spread = [run[name] for run in found[0].get("runs", ())] if len(values) == 1 else values
        spread = spread or values  # other turns of the arm, which are of another session, took the place of its runs
        row[name] = {"median": statistics.median(values), "low": min(spread), "high": max(spread)}
    row["acceptance_length"] = statistics.fmean(turn["acceptance_length"] for turn in found)
    return row


def session_of(turn: dict[str, Any]) -> int:
    """The run of the command that a turn is of; older results do not say."""
    session: int = turn.get("session", 0)
    return session


def _place(turn: dict[str, Any]) -> Place:
    return session_of(turn), turn["pass"]


def _by_pass(turns: list[dict[str, Any]], arm: str, load: str, *, steady: bool) -> dict[Place, float]:
    return {
        _place(turn): 1000 / turn["loads"][load]["step_ms"] if steady else turn["loads"][load]["tokens_per_second"]
        for turn in turns
        if turn["arm"] == arm and load in turn.get("loads", {})
    }


def _comparison(document: dict[str, Any], speeds: dict[str, dict[Place, float]], arm: str) -> Row:
    plan = document["plan"]
    reference, control = plan["reference"], plan["control"]
    if arm == reference:
        return {}
    ratio = _ratio(speeds[reference], speeds[arm])
    if arm == control:
        return {"ratio": _plain(ratio)} if ratio else {}
    machines = {str(turn["facts"]["hardware"]) for turn in document["turns"] if "facts" in turn}
    if len(machines) > 1:
        return {"refused": f"the turns ran on {len(machines)} different machines"}
    why = refusal(_ratio(speeds[reference], beside(speeds[control], speeds[arm]))) if control else None
    if why is None and ratio is None:
        why = "fewer than two passes have both arms"
    return {"refused": why} if why else {"ratio": _plain(ratio)}


def beside(runs: dict[Place, Run], other: Mapping[Place, Run]) -> dict[Place, Run]:
    """Of `runs` those of sessions that `other` has too."""
    sessions = {session for session, _ in other}
    return {place: run for place, run in runs.items() if place[0] in sessions}


def _ratio(reference: dict[Place, float], other: dict[Place, float]) -> Interval | None:
    both = sorted(reference.keys() & other.keys())
    return paired_ratio([reference[number] for number in both], [other[number] for number in both])


def _plain(ratio: Interval | None) -> Row:
    assert ratio is not None
    return asdict(ratio) | {"noise": ratio.noise, "confidence": CONFIDENCE}
