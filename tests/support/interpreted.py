"""Triton kernels without a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import python_path


def compare_on_a_gpu_or_interpreted(compare: Callable[[str], None]) -> None:
    """Call a module's `compare("cuda")` here, or `compare("cpu")` in a process whose Triton interprets."""
    if torch.cuda.is_available():
        compare("cuda")
        return
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"import {compare.__module__} as module; module.{compare.__name__}('cpu')"
    path = python_path(*(Path(file).parent for file in (compare.__code__.co_filename, __file__)))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
