"""FlashInfer on a newer GPU as it runs below compute capability 9.0.

On Hopper its wrappers choose FlashAttention 3, elsewhere FlashAttention 2, which plans and splits in another way. An
arm that requests FlashAttention 2 runs what an Ampere or Ada GPU would run, though not at that GPU's speed.
"""

import importlib
import os
from typing import Any

_NAME, _WANTED = "ASYNC_SPEC_BENCH_FLASHINFER", "fa2"

ENVIRONMENT = {_NAME: _WANTED}
"""Environment of an arm that requests FlashAttention 2."""

_asked: list[str] = []


def choose() -> None:
    """Make FlashInfer's wrappers choose FlashAttention 2, if the environment says so. Call this before any plan.

    Raises:
        RuntimeError: this FlashInfer chooses its backend in an unknown way.
    """
    if os.environ.get(_NAME) != _WANTED:
        return
    for name in ("flashinfer.prefill", "flashinfer.decode"):
        module: Any = importlib.import_module(name)
        if not hasattr(module, "determine_attention_backend"):
            raise RuntimeError(f"{name} has no determine_attention_backend, so FlashAttention 2 can't be chosen for it")
        module.determine_attention_backend = _always


def chosen() -> str | None:
    """The backend forced on the wrappers; None if they chose themselves or have not planned yet."""
    return _asked[-1] if _asked else None


def _always(*_: object, **__: object) -> str:
    _asked[:] = [_WANTED]
    return _WANTED
