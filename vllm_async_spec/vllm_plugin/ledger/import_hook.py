"""Runs an action on a module as soon as vLLM has imported it, without importing it earlier."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with module `name`: at once if the module is imported, else right after its import.

    The plugin runs in every process of vLLM, in some of them before CUDA may be initialised. There an import of vLLM's
    runner or backends would come too early.
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
    """Finds modules through the finders after it, with a loader that runs the actions after the module's code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        # Earlier finders have been asked already. If one of them also asks the others, asking again would never end.
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
        # Restore the module's own loader, which inspect, pickle and importlib.resources use.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # A module may replace itself in `sys.modules`.
        module = sys.modules.get(module.__name__, module)
        for action in _waiting.get(module.__name__, []):
            action(module)
        # Remove the actions last: if one fails, a second import must run them again.
        _waiting.pop(module.__name__, None)


def is_initialising(module: ModuleType) -> bool:
    """Whether the module's own code is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
