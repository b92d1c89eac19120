"""Child processes that end together: with all their own children, and with the parent, however the parent ends.

A child leads a process group of its own, so Ctrl-C in the terminal reaches the parent alone, which ends the group. A
parent that is killed can't do so. Then a thread of the child sees that the parent has gone, and ends the group. Linux's
`PR_SET_PDEATHSIG` would end the child alone, and leave vLLM's engine core and workers behind.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LIFELINE = "_ASYNC_SPEC_LIFELINE"
"""Environment variable with a descriptor: the reading end of a pipe that the parent holds open while it lives."""
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL: vLLM's processes release shared memory meanwhile."""

_PROC = Path("/proc")
_POLL_S = 0.02


def end_group(group: int, grace_s: float = GRACE_S) -> None:
    """End what runs of a process group: with SIGTERM, and after `grace_s` seconds with SIGKILL."""
    try:
        if _is_running(group):
            _send(group, signal.SIGTERM)
        end = time.monotonic() + grace_s
        while _is_running(group) and time.monotonic() < end:
            time.sleep(_POLL_S)
    finally:  # also when a second Ctrl-C ends the grace
        if _is_running(group):
            _send(group, signal.SIGKILL)


def end_with_parent() -> None:
    """End this process's group when the parent ends. No effect without a parent that set `LIFELINE`."""
    descriptor = os.environ.pop(LIFELINE, None)
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)
        _start_watching(lambda: os.read(int(descriptor), 1))  # returns at the pipe's end, with its last writer


class NewProcess:
    """Calls in spawned processes, which end with the context and with this process, and take their children along."""

    def __init__(self) -> None:
        self._calls: list[_Call[Any]] = []

    def __enter__(self) -> NewProcess:
        return self

    def __exit__(self, *error: object) -> None:
        for call in self._calls:
            call.end()

    def submit(self, function: Callable[..., T], *arguments: Any, **named: Any) -> _Call[T]:
        """Start a call of a function that can be pickled, with arguments that can, in a process of its own."""
        call = _Call(functools.partial(function, *arguments, **named))
        self._calls.append(call)
        return call


class _Call(Generic[T]):
    """A call in a spawned process."""

    def __init__(self, call: Callable[[], T]) -> None:
        context = multiprocessing.get_context("spawn")
        self._receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_answer, args=(sending, call))
        with _without_interrupts():
            self._process.start()
        sending.close()

    def result(self) -> T:
        """Wait for the result; can be asked for once.

        Raises:
            BrokenExecutor: the process ended without a result.
            Exception: what the function raised.
        """
        try:
            failed, result = self._receiving.recv()
        except EOFError:
            self._process.join()
            raise BrokenExecutor(
                f"the process ended with exit code {self._process.exitcode} and gave no result"
            ) from None
        if failed:
            raise result
        return result  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the process and its children."""
        assert self._process.pid is not None
        end_group(self._process.pid)
        self._process.kill()  # had it no group of its own yet
        self._process.join()


def _answer(sending: Connection, call: Callable[[], Any]) -> None:
    """What a spawned process does: call, and send (whether the call failed, result or exception)."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    _start_watching(lambda: wait([parent.sentinel]))
    try:
        sending.send((False, call()))
    except Exception as error:
        sending.send((True, error))


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT meanwhile; processes started meanwhile keep it blocked, so Ctrl-C prints no traceback of theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_watching(until_parent_ends: Callable[[], object]) -> None:
    if os.getsid(0) != os.getpgrp():
        raise RuntimeError("this process is in a group of its caller's, which must not end with it")

    def watch() -> None:
        until_parent_ends()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _send(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended meanwhile
        os.killpg(group, number)


def _is_running(group: int) -> bool:
    """Whether a process of the group has not ended. A zombie has, although signals still reach it."""
    if not (_PROC / "self" / "stat").exists():
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):  # macOS has no /proc, and refuses signals to zombies
            return False
        return True
    for stat in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False
