"""Find the Python lines that wait for a CUDA device, at the cost of microseconds a wait.

CUPTI sees every wait and its duration, but not the Python line. PyTorch's sync debug mode warns of every synchronising
operation of its own, on the thread and at the line. The mode does not warn of events, `torch.cuda.synchronize` and
non-blocking copies, so these functions are wrapped to note each call. `waits` joins both by thread and time.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_async_spec.audit.stack import RawStack, take
from vllm_async_spec.patching import Transaction

_WARNING = "called a synchronizing CUDA operation"


@dataclass(frozen=True, slots=True)
class Call:
    """One call that may have waited, in nanoseconds since the epoch, which is the clock of CUPTI's records.

    A warning comes after the wait; its start and end are both the warning's time.
    """

    thread: int
    what: str
    """`warning`, `event`, `device` or `copy`."""
    start: int
    end: int
    stack: RawStack


@dataclass(slots=True)
class CudaWaits:
    """Notes calls that may wait for a CUDA device, on every thread of this process, between `start` and `stop`."""

    calls: list[Call] = field(default_factory=list)
    _changes: Transaction = field(default_factory=Transaction)

    def start(self) -> None:
        """Start noting calls."""
        changes = self._changes
        changes.undo_with(_listen(self._on_warning))
        changes.set(torch.cuda.Event, "synchronize", self._noting(torch.cuda.Event.synchronize, "event"))
        changes.set(AuditedEvent, "listener", self._on_event)
        for module in (torch.cuda, getattr(torch, "accelerator", None)):
            if module is not None:
                changes.set(module, "synchronize", self._noting(module.synchronize, "device"))
        for name in ("to", "copy_", "cuda", "cpu"):
            changes.set(torch.Tensor, name, self._noting_copies(getattr(torch.Tensor, name)))

    def stop(self) -> None:
        """Put everything back."""
        self._changes.roll_back()

    def _noting(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            start = time.time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._note(what, start)

        return noting

    def _noting_copies(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # KnownTensor recognises the function by its __wrapped__
        def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            start = time.time_ns()
            out = function(tensor, *args, **kwargs)
            other = args[0] if function.__name__ == "copy_" and args else out
            if other is not tensor and getattr(other, "is_cuda", tensor.is_cuda) != tensor.is_cuda:
                self._note("copy", start)
            return out

        return noting

    def _on_event(self, synchronize: Callable[[], None]) -> None:
        start = time.time_ns()
        try:
            synchronize()
        finally:
            self._note("event", start)

    def _note(self, what: str, start: int) -> None:
        self.calls.append(Call(threading.get_ident(), what, start, time.time_ns(), take()))

    def _on_warning(self) -> None:
        now = time.time_ns()
        self.calls.append(Call(threading.get_ident(), "warning", now, now, take()))


_PlainEvent = torch.Event


class AuditedEvent(torch.Event):
    """A `torch.Event` that reports its waits; `torch.Event` itself is written in C and can't be changed."""

    listener: Callable[[Callable[[], None]], None] | None = None
    _timed: torch.Event | None = None
    """With `enable_timing`, recorded with this event: PyTorch measures time between events of its own class only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> AuditedEvent:
        """Take the arguments of `torch.Event`."""
        event = super().__new__(cls, *args, **kwargs)
        if kwargs.get("enable_timing"):
            event._timed = _PlainEvent(*args, **kwargs)
        return event

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Record the event on a stream, the current one if none is given."""
        super().record(*args, **kwargs)
        if self._timed is not None:
            self._timed.record(*args, **kwargs)

    def elapsed_time(self, other: torch.Event) -> float:
        """Milliseconds from this event to `other`."""
        timed = [getattr(each, "_timed", None) or each for each in (self, other)]
        return _PlainEvent.elapsed_time(*timed)

    def synchronize(self) -> None:
        """Wait for the event."""
        listener = AuditedEvent.listener
        if listener is None:
            super().synchronize()
        else:
            listener(super().synchronize)


def hear_events() -> None:
    """Make `torch.Event` report its waits: events made from now on are `AuditedEvent`s."""
    if isinstance(torch.Event, type) and not issubclass(torch.Event, AuditedEvent):
        torch.Event = AuditedEvent  # type: ignore[misc]


def _listen(heard: Callable[[], None]) -> Callable[[], None]:
    """Turn on PyTorch's sync debug mode and call `heard` at each of its warnings; the returned function undoes both."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    catcher = warnings.catch_warnings()
    catcher.__enter__()
    shown = warnings.showwarning

    def showwarning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if _WARNING in str(message):
            heard()
        else:
            shown(message, category, *args, **kwargs)

    warnings.filterwarnings("always", message=_WARNING)
    warnings.showwarning = showwarning

    def undo() -> None:
        torch.cuda.set_sync_debug_mode(mode)
        catcher.__exit__(None, None, None)

    return undo
