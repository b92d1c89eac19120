"""Results of plans, made up: what the tests of statistics, tables and figures look at."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.summary import summarise

FACTS = {
    "runner": "V1",
    "vllm": "0.32.0",
    "async_scheduling": True,
    "hardware": {"device": "a device", "cpu": "a processor"},
}
PLAN = Plan(
    name="made-up",
    about="Speeds that nobody measured",
    arms=tuple(Arm(plugin.value, "tiny", plugin=plugin) for plugin in Plugin),
    loads=find_loads(("decode-1", "mixed")),
    turns=4,
    reference="stock",
    control="noop",
)
STEADY = {"stock": [100, 101, 102, 100], "noop": [101, 100, 101, 101], "plugin": [105, 106, 107, 105]}


def measured(speed: float) -> dict[str, Any]:
    run = {"seconds": 1.0, "tokens": 2 * speed, "steps": speed, "step_ms": 1000 / speed}
    run |= {"tokens_per_second": 2 * speed, "acceptance_length": 2.0}
    return {"n": 3, "runs": [run] * 3} | {
        name: run[name] for name in ("step_ms", "tokens_per_second", "acceptance_length")
    }


def document(
    speeds: Mapping[str, Sequence[float]], plan: Plan = PLAN, facts: Mapping[str, Any] = FACTS
) -> dict[str, Any]:
    turns = [
        {
            "pass": number,
            "arm": arm,
            "facts": dict(facts),
            "loads": {load.name: measured(speed) for load in plan.loads},
            "seconds": 1.0,
        }
        for arm, passes in speeds.items()
        for number, speed in enumerate(passes)
    ]
    found = {"schema": 1, "plan": json.loads(json.dumps(dataclasses.asdict(plan))), "commands": [], "turns": turns}
    return found | {"summary": summarise(found)}


def row(found: Mapping[str, Any], arm: str, load: str = "decode-1") -> dict[str, Any]:
    return next(row for row in found["summary"] if (row["arm"], row["load"]) == (arm, load))
