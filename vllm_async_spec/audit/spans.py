"""Find when the host was in which phase: watched functions note their start and end during a recording."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from vllm_async_spec.audit.report import Phase
from vllm_async_spec.patching import Transaction

Around = Callable[..., AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Span:
    """One call of a watched function: nanoseconds since the epoch, the clock of CUPTI's records."""

    thread: int
    phase: Phase
    name: str
    start: int
    end: int
    file: str = ""
    line: int = 0


@dataclass(slots=True)
class Watch:
    """Watched functions, and their calls."""

    _noted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Thread, number of the function, start and end: the least work in a call."""
    _functions: list[tuple[Phase, str, str, int]] = field(default_factory=list)
    _changes: Transaction = field(default_factory=Transaction)
    _watched: set[tuple[int, str]] = field(default_factory=set)

    def watch(self, owner: Any, name: str, phase: Phase, *, around: Around | None = None) -> bool:
        """Note calls of `owner.name` from now on, until `stop`, as time of `phase`; whether there is such a function.

        Where a class inherits the function, the defining class is watched. An attribute that is missing or no function
        is left alone. `around` makes, from each call's arguments, a context that the call runs in.
        """
        if isinstance(owner, type):
            owner = next((base for base in owner.__mro__ if name in vars(base)), owner)
        function = inspect.getattr_static(owner, name, None)
        if not inspect.isfunction(function):
            return False
        if (id(owner), name) in self._watched:
            return True
        self._watched.add((id(owner), name))
        self._changes.set(owner, name, self._noting(function, phase, around))
        return True

    def _noting(self, function: Any, phase: Phase, around: Around | None) -> Callable[..., Any]:
        note, now, thread = self._noted.append, time.time_ns, threading.get_ident
        code = inspect.unwrap(function).__code__
        number = len(self._functions)
        self._functions.append((phase, function.__qualname__, code.co_filename, code.co_firstlineno))

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                if around is None:
                    return function(*args, **kwargs)
                with around(*args, **kwargs):
                    return function(*args, **kwargs)
            finally:
                note((thread(), number, start, now()))

        return noting

    def watch_collections(self) -> None:
        """Note Python's garbage collections from now on, until `stop`, as time of a phase of their own."""
        note, now, thread = self._noted.append, time.time_ns, threading.get_ident
        number, start = len(self._functions), 0
        self._functions.append((Phase.COLLECTION, "gc.collect", "", 0))

        def collecting(when: str, _: dict[str, int]) -> None:
            nonlocal start
            if when == "start":
                start = now()
            elif start:  # it began before the recording otherwise
                note((thread(), number, start, now()))

        def undo() -> None:
            with contextlib.suppress(ValueError):  # somebody else has emptied the list
                gc.callbacks.remove(collecting)

        self._changes.undo_with(undo)
        gc.callbacks.append(collecting)

    @property
    def spans(self) -> list[Span]:
        """The calls that have ended."""
        found = []
        for thread, number, start, end in self._noted:
            phase, name, file, line = self._functions[number]
            found.append(Span(thread, phase, name, start, end, file, line))
        return found

    def stop(self) -> None:
        """Put every function back, and note no more collections."""
        self._changes.roll_back()
        self._watched.clear()
