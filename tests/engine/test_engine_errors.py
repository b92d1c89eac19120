"""What an operator sees when something is wrong."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import serve_command, serve_environment

from vllm_async_spec.demo.train import DemoModels

# Slow: three servers that end. That a bad setting is one sentence, test_plugin_loading.py shows by default.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

NO_MODEL = Path("/no/such/model")


@dataclass(frozen=True, slots=True)
class Attempt:
    code: int
    output: str

    @property
    def last_line(self) -> str:
        return re.sub(r"^(\(.*?pid=\d+\))? *", "", self.output.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def attempts(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Attempt]:
    """All at once, since most of their time is vLLM's imports."""
    folder = tmp_path_factory.mktemp("errors")
    wanted = {
        "bogus": (models.target, {"VLLM_ASYNC_SPEC": "bogus"}),
        "no model": (NO_MODEL, {}),
        "no model, stock": (NO_MODEL, {"VLLM_ASYNC_SPEC": "off"}),
    }
    processes = {
        name: subprocess.Popen(
            serve_command(model),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=serve_environment(folder, **variables),
        )
        for name, (model, variables) in wanted.items()
    }
    try:
        outputs = {name: process.communicate(timeout=600)[0] for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    return {name: Attempt(process.returncode, outputs[name]) for name, process in processes.items()}


def test_unknown_mode_ends_the_server_with_one_sentence(attempts: Mapping[str, Attempt]):
    attempt = attempts["bogus"]
    assert attempt.code == 1
    assert "Traceback" not in attempt.output
    said = [line for line in attempt.output.splitlines() if "async-spec" in line or "VLLM_ASYNC_SPEC" in line]
    assert said == ["vllm-async-spec: VLLM_ASYNC_SPEC is 'bogus'; it must be one of auto, strict, off"]


def test_wrong_model_path_is_said_as_by_stock_vllm(attempts: Mapping[str, Attempt]):
    stock, plugin = attempts["no model, stock"], attempts["no model"]
    assert stock.code == plugin.code != 0
    assert str(NO_MODEL) in stock.last_line
    assert plugin.last_line == stock.last_line
    assert "vllm_async_spec" not in plugin.output, "the plugin is in the traceback"
