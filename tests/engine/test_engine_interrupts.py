"""`audit --model` that is interrupted or whose engine fails."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import COMMAND
from families import left, of_session
from scenario import environment

from vllm_async_spec.demo.train import DemoModels

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LOADED = "Starting to load model"
"""In the log of vLLM's worker, which is a child of the engine core, which is a child of the audit's child."""


def audit(models: DemoModels, log: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    engine = ["--model", str(models.target), "--dtype", "float32", "--enforce-eager", "--max-model-len", "768"]
    # vLLM's normal layout: the engine core and the worker in processes of their own.
    env = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | variables
    command = [*COMMAND, "audit", *engine, "--batch", "2", "--steps", "4", "--log", str(log), *options]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_of_vllms_outlives_the_audit(number: signal.Signals, models: DemoModels, tmp_path: Path):
    log = tmp_path / "engine.log"
    command = audit(models, log)
    end = time.monotonic() + 300
    while not (log.exists() and LOADED in log.read_text(errors="replace")):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < end
        time.sleep(0.2)
    processes = of_session(command.pid)
    assert len(processes) >= 3  # the audit's child, the engine core, the worker
    command.send_signal(number)
    _, said = command.communicate(timeout=120)
    assert left(processes) == []
    if number != signal.SIGKILL:
        assert command.returncode == 128 + number
        assert said == f"vllm-async-spec: interrupted by {number.name}; the processes of this command have ended\n"


@pytest.mark.slow
def test_an_engine_that_fails_is_named_by_its_own_error(models: DemoModels, tmp_path: Path):
    log = tmp_path / "engine.log"
    command = audit(models, log, "--kv-cache-memory-bytes", "1000", VLLM_CPU_KVCACHE_SPACE="0")
    _, said = command.communicate(timeout=500)
    assert "See root cause above" in log.read_text(errors="replace")
    assert command.returncode == 1
    assert said.startswith(
        "vllm-async-spec: the engine could not be audited: ValueError: No available memory for the cache blocks. "
    )
    assert said.endswith(f"(log: {log})\n")
    assert said.count("\n") == 1
