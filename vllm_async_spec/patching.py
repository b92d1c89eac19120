"""Changes of attributes that are made together or not at all."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any

_ABSENT = object()


class Transaction:
    """Sets attributes; if the `with` block raises, every one is put back as it was, in reverse order.

    What it sets is what is named: it never walks a class's `__dict__`, to which newer Pythons add names of their own.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`, remembering what the owner itself (not its bases) had there."""
        self._undo.append(functools.partial(_put, owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_function(self, module: ModuleType, name: str, value: Any) -> None:
        """Set `module.name`, and the same name wherever that function has been imported under it already.

        vLLM's command line imports some of its modules before it loads plugins; those hold the original by name.
        """
        original = getattr(module, name)
        # Put back wherever it is then: modules that are imported later take the new one.
        self._undo.append(functools.partial(_replace, name, value, original))
        _replace(name, original, value)

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Have `undo` called in its turn when everything is put back."""
        self._undo.append(undo)

    def roll_back(self) -> None:
        """Put everything back."""
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
    """Changes that last for the `with` block, however it ends.

    Yields:
        The transaction that takes the changes, at any time within the block.
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
