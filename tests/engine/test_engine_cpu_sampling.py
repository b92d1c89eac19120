"""A finding about vLLM's CPU build: with drafts its sampler reads memory that nobody wrote."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cpu_sampling import ONE_CHOICE
from rank_runs import differing
from results import Mode
from scenario import environment

from vllm_async_spec.demo.train import EOS_ID, PROMPTS, DemoModels

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Sampled = dict[str, dict[str, Any]]
NEVER_DRAWN = 0.2
"""How far, in log-probability, a token is behind that the lowest temperature does not draw."""


def sampled(mode: Mode, models: DemoModels) -> Sampled:
    command = [sys.executable, str(Path(__file__).with_name("cpu_sampling.py")), mode.value]
    done = subprocess.run(
        [*command, str(models.target), str(models.draft)], capture_output=True, text=True, env=environment(mode)
    )
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stderr[-3000:]
    return {each["sampled"]: each for each in found}


@pytest.fixture(scope="module")
def both(models: DemoModels) -> dict[Mode, Sampled]:
    modes = Mode.SYNC, Mode.PLUGIN
    with ThreadPoolExecutor() as pool:
        return dict(zip(modes, pool.map(lambda mode: sampled(mode, models), modes), strict=True))


def test_stock_vllm_samples_garbage_or_dies(both: dict[Mode, Sampled]):
    stock = both[Mode.SYNC]
    garbage = [name for name in ONE_CHOICE if name in stock and stock[name]["tokens"] != stock["greedy"]["tokens"]]
    assert garbage, "upstream has mended it: the patch cpu-sampling can go"
    assert any(each["failed"] for each in stock.values()), "upstream has mended it: cpu-sampling-top-k can go"


@pytest.mark.parametrize("name", ONE_CHOICE)
def test_with_the_plugin_one_choice_is_the_greedy_one(both: dict[Mode, Sampled], name: str):
    found = both[Mode.PLUGIN]
    assert found[name]["failed"] is None
    assert found["greedy"]["tokens"] == both[Mode.SYNC]["greedy"]["tokens"]
    assert differing(found["greedy"], found[name], NEVER_DRAWN if name == "temperature" else 0.0) == []


def test_with_the_plugin_several_choices_are_sampled(both: dict[Mode, Sampled]):
    several = both[Mode.PLUGIN]["several"]
    assert several["failed"] is None
    assert [len(tokens) for tokens in several["tokens"]] == [32] * len(PROMPTS)
    assert {token for tokens in several["tokens"] for token in tokens} <= set(range(EOS_ID + 1))
    assert several["tokens"] != both[Mode.PLUGIN]["greedy"]["tokens"]
