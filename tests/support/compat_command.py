"""`vllm-async-spec compat` in this process, for tests of the command."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_async_spec.cli import app

SUPPORT = Path(__file__).parent


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
