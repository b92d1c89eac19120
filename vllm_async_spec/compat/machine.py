"""Which machine a builder is made for, and the parts of one that only a larger machine has."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.check import AbsentError
from vllm_async_spec.compat.vllm_source import loaded_source
from vllm_async_spec.patching import temporarily

__all__ = ["BLACKWELL", "HOPPER", "context_parallel", "stand_on", "workspace"]

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities: an H200's, and a B200's."""

_ASKED_ONCE = ("vllm.utils.flashinfer",)
"""Modules whose functions keep what the machine once answered."""


def stand_on(capability: tuple[int, int] | None, name: str) -> None:
    """Let the loaded release find a GPU of this compute capability.

    Args:
        capability: What the backend needs; None if it does not matter.
        name: The backend, for the message.

    Raises:
        AbsentError: vLLM is installed rather than loaded from a folder, and finds another GPU, or none.
    """
    source = loaded_source()
    if source is not None:
        wanted = capability or HOPPER
        if source.capability != wanted:
            source.capability = wanted
            _forget()
        return
    if capability is None:
        return
    found = importlib.import_module("vllm.platforms").current_platform.get_device_capability()
    if found is None or tuple(found) != capability:
        has = "has none" if found is None else f"has {found[0]}.{found[1]}"
        wanted_name = f"compute capability {capability[0]}.{capability[1]}"
        raise AbsentError(f"{name} needs {wanted_name}, and this machine {has}", f"needs {wanted_name}")


def _forget() -> None:
    for name in _ASKED_ONCE:
        for value in list(vars(sys.modules.get(name, SimpleNamespace())).values()):
            if isinstance(value, FunctionType | functools._lru_cache_wrapper) and hasattr(value, "cache_clear"):
                value.cache_clear()


@contextlib.contextmanager
def context_parallel(config: Any, ranks: int) -> Iterator[None]:
    """Make `config` and the process those of rank 0 of `ranks` that share each request's KV cache.

    There is one process, so nothing may communicate within.

    Args:
        config: vLLM's configuration; it stays changed.
        ranks: Of decode context parallelism.
    """
    config.parallel_config.decode_context_parallel_size = ranks
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    with temporarily() as changes:
        changes.set(state, "_DCP", group)
        yield


@contextlib.contextmanager
def workspace(device: torch.device) -> Iterator[None]:
    """Let builders and layers have what the engine shares for scratch, which it makes at start-up."""
    try:
        workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    except ModuleNotFoundError:
        yield
        return

    def get_simultaneous(*wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]

    with temporarily() as changes:
        changes.set(workspace, "_manager", SimpleNamespace(get_simultaneous=get_simultaneous))
        yield
