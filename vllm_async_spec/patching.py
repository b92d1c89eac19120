"""Transactions that set attributes: all changes are made, or none."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any

_ABSENT = object()


class Transaction:
    """Sets attributes; if the `with` block raises, restores all of them in reverse order.

    Sets only named attributes and never walks a class's `__dict__`, to which newer Pythons add names of their own.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`, and remember the previous value of the owner itself, not of its bases."""
        self._undo.append(functools.partial(_put, owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_function(self, module: ModuleType, name: str, value: Any) -> None:
        """Set `module.name`, and the same name in every module that has already imported the function under it.

        vLLM's command line imports some of its modules before it loads plugins; these modules hold the original.
        """
        original = getattr(module, name)
        # The undo searches all modules again, because modules imported later hold the new function.
        self._undo.append(functools.partial(_replace, name, value, original))
        _replace(name, original, value)

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Call `undo` in its turn when the changes are rolled back."""
        self._undo.append(undo)

    def roll_back(self) -> None:
        """Undo all changes, the last one first."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.roll_back()


@contextlib.contextmanager
def temporarily() -> Iterator[Transaction]:
    """Changes that last for the `with` block, even if the block raises.

    Yields:
        The transaction, which takes changes at any time within the block.
    """
    transaction = Transaction()
    try:
        yield transaction
    finally:
        transaction.roll_back()


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _replace(name: str, old: Any, new: Any) -> None:
    """Set `name` to `new` in every module that has `old` under it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
