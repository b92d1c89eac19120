"""Triton kernels that compile once for a device, so that no request waits for a compilation."""

# No `from __future__ import annotations` in modules of kernels: Triton reads the annotations of their constants.
from collections.abc import Callable
from typing import Any

import triton


def compiled_once(*numbers: str) -> Callable[[Any], Any]:
    """Make a function a Triton kernel that is not compiled again for other numbers, strides or alignments.

    Triton compiles anew where an integer becomes 1 or a multiple of 16, and where a pointer loses its alignment to 16
    bytes. Other dtypes and other constants still need a compilation.

    Args:
        numbers: the function's integers. All other arguments are tensors, or constants that are annotated.
    """

    def kernel(function: Any) -> Any:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        tensors = [name for name in names if name not in numbers and name not in function.__annotations__]
        return triton.jit(function, do_not_specialize=[*numbers], do_not_specialize_on_alignment=tensors)

    return kernel
