"""`vllm-async-spec compat` in this process and in one of its own, for tests of the command."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND
from typer.testing import CliRunner, Result

from vllm_async_spec.cli import app

SUPPORT = Path(__file__).parent
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def in_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the planted builders can be imported, with the variables that the command sets for its own process."""
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("VLLM_ASYNC_SPEC", "off")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")


def compat(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compat", *arguments])


def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since vLLM stays what it is imported as."""
    return subprocess.run([*COMMAND, "compat", *arguments], capture_output=True, text=True)
