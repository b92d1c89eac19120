"""Ways of changing a tensor in place: those that PyTorch's version counter shows, and those that nothing shows."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

MODES: dict[str, Callable[[], Any]] = {
    "normal": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def writers(device: str) -> dict[str, Callable[[torch.Tensor], object]]:
    """By name, what adds one to each element of an int32 tensor on this device."""
    anywhere: dict[str, Callable[[torch.Tensor], object]] = {
        "add_": lambda tensor: tensor.add_(1),
        "a view": lambda tensor: tensor.view(-1)[:].add_(1),
        "out": lambda tensor: torch.add(tensor, 1, out=tensor),
        "foreach": lambda tensor: torch._foreach_add_([tensor], 1),
        "data": lambda tensor: tensor.data.add_(1),
        "copy_ in inference mode": lambda tensor: torch.inference_mode()(tensor.copy_)(tensor + 1),
    }
    if device == "cpu":
        anywhere |= {"numpy": _by_numpy, "ctypes": _by_ctypes}
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        anywhere["Triton kernel"] = _by_kernel
    if device == "cuda":
        anywhere["graph replay"] = _by_graph
    return anywhere


def _by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] += 1


def _by_ctypes(tensor: torch.Tensor) -> None:
    values = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int32))
    for index in range(tensor.numel()):
        values[index] += 1


def _by_kernel(tensor: torch.Tensor) -> None:
    from length_writers_triton import add_one

    add_one(tensor)


def _by_graph(tensor: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        tensor.add_(1)
    graph.replay()
