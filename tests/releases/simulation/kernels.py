"""Triton kernels of vLLM and the plugin, run on the simulated device by Triton's own interpreter."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from simulation.device import Gpu

_interpreted: dict[Any, Any] = {}


def interpreted(kernel: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    if kernel.fn not in _interpreted:
        _interpreted[kernel.fn] = InterpretedFunction(kernel.fn)
    return _interpreted[kernel.fn]


@contextlib.contextmanager
def interpreting(gpu: Gpu) -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("num_warps", "num_stages", "num_ctas")}
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, args, strict=False)) | kwargs)
        gpu.kernel(interpreted(self)[grid], *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A kernel calls another, as those of `tl` are.
        return interpreted(self)(*args, **kwargs)

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(JITFunction, "__call__", call):
        yield
