"""The demo's models, and every scenario that the selected tests ask for, run once in each mode."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from catalogue import ENGINES, SCENARIOS
from comparison import Outcome
from results import Mode, Result
from scenario import environment

from vllm_async_spec.demo.train import DemoModels, prepare_models

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cpu_platform() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'vllm-async-spec[cpu]'")
    if torch.cuda.is_available():
        pytest.skip("these tests are of vLLM's CPU platform, which vLLM does not take where there is a GPU")


@pytest.fixture(scope="session")
def models(cpu_platform: None) -> DemoModels:
    return prepare_models(HERE.parents[1] / ".cache" / "demo")


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Outcome]:
    # "to-the-end" is what others are compared with.
    named = {"to-the-end"} | {
        item.callspec.params.get("outcome") for item in request.session.items if hasattr(item, "callspec")
    }
    folder = tmp_path_factory.mktemp("engine")
    children = {mode: _start(mode, [name for name in SCENARIOS if name in named], models, folder) for mode in Mode}
    try:
        codes = {mode: child.wait() for mode, child in children.items()}
    finally:
        for child in children.values():
            child.kill()
    logs = {mode: (folder / f"{mode.value}.log").read_text(encoding="utf-8", errors="replace") for mode in Mode}
    for mode, code in codes.items():
        if code:
            pytest.fail(f"the process of {mode.value} ended with {code}; the end of its log:\n{logs[mode][-4000:]}")
    results: dict[str, dict[Mode, Result]] = {}
    for mode in Mode:
        for line in (folder / f"{mode.value}.jsonl").read_text(encoding="utf-8").splitlines():
            result = Result.from_json(json.loads(line))
            results.setdefault(result.scenario, {})[mode] = result
    return {name: Outcome(by_mode, logs) for name, by_mode in results.items()}


def _start(mode: Mode, names: list[str], models: DemoModels, folder: Path) -> subprocess.Popen[bytes]:
    if mode is Mode.ASYNC:
        names = [name for name in names if ENGINES[SCENARIOS[name].engine].asynchronous]
    command: list[str | Path] = [sys.executable, HERE / "scenario.py", "--mode", mode.value]
    command += ["--out", folder / f"{mode.value}.jsonl", "--target", models.target, "--draft", models.draft]
    command += [argument for name in names for argument in ("--scenario", name)]
    with (folder / f"{mode.value}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(mode))


@pytest.fixture
def outcome(request: pytest.FixtureRequest, outcomes: Mapping[str, Outcome]) -> Outcome:
    return outcomes[request.param]
