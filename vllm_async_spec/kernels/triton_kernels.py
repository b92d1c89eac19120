"""The choice between a Triton kernel and its PyTorch reference; imports Triton when the first Triton kernel runs."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch


def runs_as_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel on this tensor runs in Triton: on a GPU, or if `TRITON_INTERPRET` is 1."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def kernels_of(module: str) -> Any:
    """The module `{module}_triton`, which holds the Triton kernels of `module`."""
    return importlib.import_module(f"{module}_triton")
