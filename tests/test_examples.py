"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(example: str) -> str:
    """What the example prints."""
    pytest.importorskip("transformers", reason="pip install 'vllm-async-spec[transformers]'")
    done = subprocess.run([sys.executable, EXAMPLES / example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_interleaving():
    assert "interleaved: the same tokens" in run("interleaving.py")


def test_async_stopping():
    printed = run("async_stopping.py")
    assert "custom_generate: the same tokens" in printed
    assert "async_stopping_criteria: the same tokens" in printed


def test_continuous_batching():
    printed = run("continuous_batching.py")
    assert "6 requests, the same tokens" in printed
    assert "with a draft model: the same tokens" in printed
    assert printed.count("streamed ") == 3
