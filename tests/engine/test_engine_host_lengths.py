"""A builder that reads every host property in every build of a real engine gets what the device has, each time."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import python_path

from benchmarks import child
from benchmarks.arms import Acceptance, Arm, Plugin
from benchmarks.loads import Load
from benchmarks.plans.engines import BESIDE_OTHERS, CPU_ENGINE, CPU_ENVIRONMENT
from benchmarks.shapes import Method

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

LOAD = Load("decode", requests=6, running=4, prompt=(8, 40), output=(12, 24))
READER = Path(__file__).parents[1] / "support" / "host_reader"
ON_GPU = torch.cuda.is_available()
RUNNERS = ("V1", "V2") if ON_GPU else ("V1",)
"""vLLM's V2 runner needs a GPU."""


def arm_of(method: Method, draft_tokens: int, runner: str, **environment: str) -> Arm:
    engine: dict[str, Any] = {"enforce_eager": True} | BESIDE_OTHERS if ON_GPU else CPU_ENGINE
    return Arm(
        f"{method.value} K = {draft_tokens} {runner}",
        "tiny",
        plugin=Plugin.ON,
        runner=runner if ON_GPU else None,
        method=method,
        draft_tokens=draft_tokens,
        acceptance=Acceptance(0.7),
        engine=engine,
        environment=({} if ON_GPU else CPU_ENVIRONMENT) | {"PYTHONPATH": python_path(READER)} | environment,
    )


def builds_of(arm: Arm, folder: Path) -> list[dict[str, Any]]:
    out = folder / "builds.jsonl"
    arm = dataclasses.replace(arm, environment={**arm.environment, "HOST_READER": str(out)})
    with child.start(arm, [LOAD], audit=False, env=None, models=folder, log=folder / "log") as engine:
        engine.wait_until_ready()
        assert engine.ask("describe")["async_scheduling"]
        warm_up = len(out.read_text().splitlines()) if out.exists() else 0
        engine.ask("measure", load=LOAD.name, seconds=0, repetitions=1)
    return [json.loads(line) for line in out.read_text().splitlines()[warm_up:]]


SOME = [(Method.DRAFT_MODEL, 4), (Method.EAGLE, 3)]
ALL = [(method, count) for method in (Method.DRAFT_MODEL, Method.EAGLE) for count in range(1, 6)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("method", "draft_tokens"),
    [pytest.param(*each, marks=() if each in SOME else pytest.mark.slow) for each in ALL],
)
def test_every_host_property_is_exact_in_every_build(method: Method, draft_tokens: int, runner: str, tmp_path: Path):
    if runner == "V2" and method is Method.DRAFT_MODEL:
        from vllm import __version__

        if tuple(map(int, __version__.split(".")[:2])) < (0, 31):
            pytest.skip("vLLM's V2 runner takes draft models from 0.31 on")
    builds = builds_of(arm_of(method, draft_tokens, runner), tmp_path)
    stale = [build for build in builds if build["stale"]]
    steps = sum(build["tokens"] > 1 for build in builds)
    print(f"{method.value} K = {draft_tokens}, {runner}: {len(stale)} of {len(builds)} builds had a stale value")
    assert steps > 8, "the target's own builds"
    assert len(builds) > steps or runner == "V2" or draft_tokens == 1, "V1 builds for each draft but the first"
    assert not stale


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_property_that_keeps_its_copy_is_seen(runner: str, tmp_path: Path):
    builds = builds_of(arm_of(Method.EAGLE, 3, runner, HOST_READER_CONTROL="keep"), tmp_path)
    stale = [build for build in builds if build["stale"]]
    print(f"control, {runner}: {len(stale)} of {len(builds)} builds had a stale value")
    assert len(stale) > len(builds) / 8
