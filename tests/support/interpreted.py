"""Triton kernels without a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def compare_on_a_gpu_or_interpreted(compare: Callable[[str], None]) -> None:
    """Call a test module's `compare(device)`: with `cuda` here, or with `cpu` where Triton interprets its kernels.

    That is a process of its own, because Triton chooses the interpreter when it is first imported.
    """
    if torch.cuda.is_available():
        compare("cuda")
        return
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"import {compare.__module__} as module; module.{compare.__name__}('cpu')"
    folders = [str(Path(file).parent) for file in (compare.__code__.co_filename, __file__)]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
