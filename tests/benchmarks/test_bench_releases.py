"""Whether each release takes the command lines of its servers and of its client, by its own source; nothing runs."""

import functools
import re
from pathlib import Path

import pytest

from benchmarks.arms import Arm
from benchmarks.plans import PLANS, find_plan
from benchmarks.plans.serving import SERVE_PLANS, find_serve_plan
from benchmarks.serving.arguments import client_arguments, load_arguments, sample_arguments, server_arguments
from benchmarks.serving.plan import ServePlan
from benchmarks.shapes import find_shape

ROOT = Path(__file__).parents[2]
PLANNED = [find_serve_plan(name) for name in SERVE_PLANS if find_serve_plan(name).arms[0].release]


@functools.cache
def source(release: str | None, folder: str) -> str:
    path = ROOT / ".cache" / "releases" / str(release) / "vllm" / folder
    if not path.exists():
        pytest.skip(f"{path} is not there; `make test-releases` fetches it")
    return "".join(each.read_text() for each in ([path] if path.is_file() else sorted(path.rglob("*.py"))))


def takes(release: str | None, argument: str) -> bool:
    field = argument.removeprefix("--").removeprefix("no-").replace("-", "_")
    folders = ("engine/arg_utils.py", "entrypoints")
    if f'"{argument}",' in source(release, "entrypoints"):  # an argument that no class has as a field
        return True
    return any(re.search(rf"^    {field}\s*:", source(release, folder), re.MULTILINE) for folder in folders)


def options(arguments: list[str]) -> set[str]:
    return {each.partition("=")[0] for each in arguments if each.startswith("--")}


@pytest.mark.parametrize("plan", PLANNED, ids=lambda plan: plan.name)
def test_a_server_and_a_client_take_the_arguments_of_their_plan(plan: ServePlan, tmp_path: Path):
    for arm in plan.arms:
        asked = options(server_arguments(arm, models=tmp_path, tokenizer=tmp_path, port=18000))
        assert [each for each in asked if not takes(arm.release, each)] == []
    client = client_arguments(port=18000, tokenizer=tmp_path, dataset=tmp_path, requests=1)
    client += sample_arguments(1, seeded=True)
    client += [part for load in plan.loads for part in load_arguments(load, plan, 0)]
    benchmarks = source(plan.arms[0].release, "benchmarks")
    assert [each for each in options(client) if f'"{each}"' not in benchmarks] == []


ARMS = {(arm.release, *arm.engine): arm for name in PLANS for arm in find_plan(name).arms if arm.release}


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: f"{arm.release}-{arm.name}-{arm.shape}")
def test_an_engine_takes_the_arguments_of_its_arm(arm: Arm):
    assert find_shape(arm.shape)
    assert [name for name in arm.engine if not takes(arm.release, name)] == []
