"""The `torch_compile` option, for steps that are compiled and then captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

Compile = bool | str | dict[str, Any]
"""Whether to compile; a name chooses the backend, a dict holds arguments of `torch.compile`."""

_ARGUMENTS = ("backend", "fullgraph", "mode", "options")
_CAPTURING_MODES = ("reduce-overhead", "max-autotune")
"""Modes of `torch.compile` that make CUDA graphs of their own, which ignore this package's streams."""


def compile_arguments(chosen: Compile) -> dict[str, Any] | None:
    """Arguments of `torch.compile`; None if nothing is compiled.

    Raises:
        ValueError: an argument is invalid or unsupported; the message names it.
    """
    if not isinstance(chosen, bool | str | dict):
        raise ValueError(f"torch_compile is {chosen!r}; it must be bool or str or dict")
    if not chosen and not isinstance(chosen, dict):
        return None
    named = {"backend": "inductor" if chosen is True else chosen}
    arguments: dict[str, Any] = dict(chosen) if isinstance(chosen, dict) else named
    for name in arguments:
        if name not in _ARGUMENTS:
            raise ValueError(f"torch_compile has the argument {name!r}; it takes only {', '.join(_ARGUMENTS)}")
    backend, mode, options = (arguments.get(name) for name in ("backend", "mode", "options"))
    if isinstance(backend, str) and backend not in torch._dynamo.list_backends(()):
        raise ValueError(
            f"torch_compile has the backend {backend!r}, which PyTorch does not know; leave out the backend to use "
            "inductor, or choose one of torch._dynamo.list_backends()"
        )
    if mode is not None and options is not None:
        raise ValueError(
            f"torch_compile has both the mode {mode!r} and options, but PyTorch takes only one; leave out one of them"
        )
    if mode in _CAPTURING_MODES or (options or {}).get("triton.cudagraphs"):
        raise ValueError(
            f"torch_compile is {chosen!r}, which makes its own CUDA graphs, but this package already captures steps; "
            "use the mode 'max-autotune-no-cudagraphs' instead"
        )
    return arguments


@contextlib.contextmanager
def compiling_each(what: str, arguments: dict[str, Any] | None) -> Iterator[None]:
    """Lift PyTorch's recompile limits in the block, beyond which calls run uncompiled.

    `what` names the compiled object. Without arguments of `torch.compile`, nothing is compiled.

    Raises:
        ValueError: compilation fails.
    """
    if arguments is None:
        yield
        return
    from torch._dynamo import config, exc

    try:
        with config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
            yield
    except exc.TorchDynamoException as error:
        raise ValueError(f"{what} can't be compiled; give torch_compile=False: {error}") from error
