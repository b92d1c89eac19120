"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_interleaving():
    pytest.importorskip("transformers", reason="pip install 'vllm-async-spec[transformers]'")
    command = [sys.executable, EXAMPLES / "interleaving.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "interleaved: the same tokens" in done.stdout


def test_async_stopping():
    pytest.importorskip("transformers", reason="pip install 'vllm-async-spec[transformers]'")
    command = [sys.executable, EXAMPLES / "async_stopping.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "custom_generate: the same tokens" in done.stdout
    assert "async_stopping_criteria: the same tokens" in done.stdout


def test_continuous_batching():
    pytest.importorskip("transformers", reason="pip install 'vllm-async-spec[transformers]'")
    command = [sys.executable, EXAMPLES / "continuous_batching.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "6 requests, the same tokens" in done.stdout
    assert "with a draft model: the same tokens" in done.stdout
    assert done.stdout.count("streamed ") == 3
