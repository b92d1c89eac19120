"""FlashInfer as it is below compute capability 9.0, on a GPU that is newer.

On Hopper its wrappers choose FlashAttention 3, elsewhere FlashAttention 2, which plans and splits in another way. An
arm that asks for the latter runs what an Ampere or Ada GPU would run, though not at its speed.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

_NAME, _WANTED = "ASYNC_SPEC_BENCH_FLASHINFER", "fa2"

ENVIRONMENT = {_NAME: _WANTED}
"""Of an arm that asks for it."""

_asked: list[str] = []


def choose() -> None:
    """Have FlashInfer's wrappers choose FlashAttention 2, if the environment asks for it; before any of them plans.

    Raises:
        RuntimeError: this FlashInfer chooses in another way than the known ones.
    """
    if os.environ.get(_NAME) != _WANTED:
        return
    for name in ("flashinfer.prefill", "flashinfer.decode"):
        module: Any = importlib.import_module(name)
        if not hasattr(module, "determine_attention_backend"):
            raise RuntimeError(f"{name} has no determine_attention_backend, so FlashAttention 2 can't be chosen for it")
        module.determine_attention_backend = _always


def chosen() -> str | None:
    """What the wrappers were told to run, None if they chose by themselves or have not planned yet."""
    return _asked[-1] if _asked else None


def _always(*_: object, **__: object) -> str:
    _asked[:] = [_WANTED]
    return _WANTED
