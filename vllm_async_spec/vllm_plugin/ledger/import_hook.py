"""Doing something to a module as soon as it exists, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with module `name`: at once if it is imported, else right after somebody imports it.

    The plugin runs in every process of vLLM, in some of them before CUDA may be touched; importing vLLM's runner or
    backends there would be an import too early.
    """
    module = sys.modules.get(name)
    if module is not None and not is_initialising(module):
        action(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(action)


_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the finders after it find, with a loader that runs the actions after the module's own code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        # Those before it have been asked. To ask them again would not end where one of them does as this one.
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else []:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, which inspect, pickle and importlib.resources ask for.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # A module may put something else in its place.
        module = sys.modules.get(module.__name__, module)
        for action in _waiting.get(module.__name__, []):
            action(module)
        # Only now, so that who imports again after an action failed does not get the module without it.
        _waiting.pop(module.__name__, None)


def is_initialising(module: ModuleType) -> bool:
    """Whether the module's own code is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
