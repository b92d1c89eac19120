"""What a CUDA graph keeps of a model's Python: a key that shows when it has changed, and what can't be kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_COMPARED = _PLAIN + _CONTAINERS
_DEEPEST = 6
"""Containers within each other that are looked into; a container may hold itself."""
_MACHINERY = vars(torch.nn.Module()).keys() - {"training"}
"""Attributes of every module: weights, hooks and submodules, which are looked at on their own."""
_HARMLESS = ("transformers.", "accelerate.", "vllm_async_spec.")
"""Packages whose hooks do nothing on the host that a decode step needs."""


def frozen_in_graphs(model: torch.nn.Module) -> list[Any]:
    """A key that is another one once a model's Python would launch other steps; weights and buffers are no part of it.

    It has the classes, plain attributes, hooks and replaced forwards of all modules, and the contents of their configs.
    """
    modules = list(model.modules())
    configs = {id(own["config"]): own["config"] for own in map(vars, modules) if "config" in own}
    return [*map(_of_module, modules), *map(_plain, configs.values())]


def why_not_captured(model: torch.nn.Module) -> str | None:
    """The reason why a step of the model can't be repeated by a graph, if known without a capture; None if not."""
    module = with_foreign_hook(model)
    if module is None:
        return None
    return (
        f"a {type(module).__name__} has a forward hook, whose Python a graph does not repeat; remove the hook, or pass "
        "cuda_graphs=False"
    )


def with_foreign_hook(model: torch.nn.Module) -> torch.nn.Module | None:
    """The first module with a forward hook that may do anything; None if no module has any."""
    hooked = (each for each in model.modules() if any(not _is_harmless(hook) for hook in _hooks(each)))
    return next(hooked, None)


def _of_module(module: torch.nn.Module) -> tuple[Any, ...]:
    """Of one module: its class, plain attributes, hooks, and a replaced forward."""
    own = vars(module)
    plain = [
        (name, _plain(value)) for name, value in own.items() if name not in _MACHINERY and isinstance(value, _COMPARED)
    ]
    # Ids of hooks are never used twice. A strong reference to a forward might keep the model alive.
    forward = weakref.ref(own["forward"]) if "forward" in own else None
    return type(module), plain, [*module._forward_pre_hooks, *module._forward_hooks], forward


def _plain(value: Any, depth: int = _DEEPEST) -> Any:
    """A copy of plain values, containers and configurations that can be compared; only the type of anything else."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, PretrainedConfig):
        value = vars(value)
    if depth == 0 or not isinstance(value, _CONTAINERS):
        return type(value)
    if isinstance(value, dict):
        return tuple((_plain(name, depth - 1), _plain(each, depth - 1)) for name, each in value.items())
    held = (_plain(each, depth - 1) for each in value)
    return frozenset(held) if isinstance(value, set | frozenset) else tuple(held)


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _is_harmless(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_HARMLESS)
