"""Runs steps in a thread beside an event loop.

One thread drives at a time. When the event loop that started it ends, another loop that waits for tokens takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.generation.batching.request import BatcherError


@dataclass(frozen=True, slots=True)
class Work:
    """The work to drive."""

    step: Callable[[], object]
    """Runs one step, after the step of another thread if one is running."""
    busy: Callable[[], bool]
    """Whether there is anything left to do."""


@dataclass(slots=True, eq=False)
class _Drive:
    """One stretch of steps, from `start` until nothing is left to do or its event loop ends."""

    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[None] | None = None
    """Watches the thread. An event loop that ends cancels its tasks, and so stops the drive."""
    cancelled: bool = False

    @property
    def stopped(self) -> bool:
        """Whether no further step may begin."""
        if self.cancelled or self.loop.is_closed():
            return True
        # Python 3.10 has no `cancelling`; there a cancellation is seen when the event loop has run once more.
        cancelling: Callable[[], int] = getattr(self.task, "cancelling", int)
        return self.task is not None and (self.task.done() or cancelling() > 0)

    async def watch(self, thread: asyncio.Future[Any]) -> None:
        """Wait until the thread has ended, also when cancelled: the event loop must outlive the last step."""
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            self.cancelled = True
            await thread
            raise


class Driver:
    """Runs steps while there is work and an event loop that wants them.

    The driver has its own thread, because an event loop's executor may be full of callers that wait for tokens. No
    task of an event loop refers to the work: the task would keep the batcher alive, and with it the cache.
    """

    def __init__(self) -> None:
        self._ended = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ContinuousBatcher")
        self._lock = threading.Lock()
        self._current: _Drive | None = None
        self._followers: set[asyncio.AbstractEventLoop] = set()
        """Event loops that want the work in hand done."""
        self._started: set[asyncio.AbstractEventLoop] = set()
        """Event loops that want all work done, also what comes after the driver has been idle."""

    def start(self, work: Work) -> None:
        """Drive from the running event loop, unless another loop drives, now and after each `wake` until the loop ends.

        Raises:
            BatcherError: the last step of a stopped driver has not returned.
        """
        current = self._current
        if current is not None and current.stopped:
            raise BatcherError("a stopped driver is still in step(); start the batcher after that step() returns")
        with self._lock:
            self._started.add(asyncio.get_running_loop())
        self.follow(work)

    def wake(self, work: Work) -> None:
        """Drive again from a loop that called `start`, if nobody drives; from any thread."""
        with self._lock:
            if self._current is not None:
                return
            loops = set(self._started)
        self._call(loops, work)

    def end(self) -> None:
        """Start no thread any more, and let go of the one there is; may be repeated, and called in that thread."""
        with self._lock:
            self._ended = True
            self._started.clear()
        self._thread.shutdown(wait=False)

    def follow(self, work: Work) -> None:
        """Drive from the running event loop, as soon as the current drive and its last step have ended."""
        loop = asyncio.get_running_loop()
        with self._lock:
            current = self._current
            if self._ended:
                return
            if current is not None:
                if current.stopped or current.loop is not loop:
                    self._followers.add(loop)
                return
            current = self._current = _Drive(loop)
        try:
            thread = loop.run_in_executor(self._thread, self._run, current, work)
            current.task = loop.create_task(current.watch(thread))
        except BaseException:
            # For example, no thread could be started. The next `start` must find no driver.
            self._stop_driving(current, work)
            if not self._ended:  # meanwhile, in another thread
                raise

    def _run(self, drive: _Drive, work: Work) -> None:
        try:
            # A step that fails has told every request why the batcher stopped.
            with contextlib.suppress(Exception):
                while not drive.stopped and self._has_work(drive, work):
                    work.step()
        finally:
            self._stop_driving(drive, work)

    def _has_work(self, drive: _Drive, work: Work) -> bool:
        # Under the lock: a caller that submits after this check, and then calls `follow`, finds no driver.
        with self._lock:
            if self._current is drive and not work.busy():
                self._current = None
                self._followers.clear()
            return self._current is drive

    def _stop_driving(self, drive: _Drive, work: Work) -> None:
        with self._lock:
            if self._current is not drive:
                return
            self._current = None
            if drive.stopped:
                self._started.discard(drive.loop)
            loops, self._followers = self._followers | self._started, set()
        self._call(loops, work)

    def _call(self, loops: set[asyncio.AbstractEventLoop], work: Work) -> None:
        for loop in loops:
            # The first loop to run `follow` drives, and the others follow it.
            try:
                loop.call_soon_threadsafe(self.follow, work)
            except Exception:  # the loop is closed
                with self._lock:
                    self._started.discard(loop)
