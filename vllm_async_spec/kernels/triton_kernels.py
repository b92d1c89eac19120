"""Whether a kernel runs as Triton's or as its PyTorch reference, and Triton's, imported when the first one runs."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch


def runs_as_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel on this tensor is Triton's: on a GPU, or where its interpreter is asked for."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def kernels_of(module: str) -> Any:
    """The Triton kernels of a module of this package, which are in the module beside it."""
    return importlib.import_module(f"{module}_triton")
