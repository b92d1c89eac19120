"""How far the demo is: a bar on a terminal, and a line every few seconds elsewhere, such as in a log of CI."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, Task

_EVERY_S = 5.0
_LOOK_S = 0.25


@contextlib.contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """A progress whose newest unfinished task is shown on the console while the context lasts."""
    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            yield progress
        return
    progress = Progress(console=console, disable=True)  # counts, and draws nothing
    lines = ProgressLines(progress, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            lines.look()

    thread = threading.Thread(target=watch, name="demo-progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()


class ProgressLines:
    """Writes a line, of at most 80 characters, when a task begins, and again every `every_s` seconds until it ends.

    The newest unfinished task of `progress` is told. `clock` gives seconds, from any start.
    """

    def __init__(
        self,
        progress: Progress,
        write: Callable[[str], None],
        *,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._write = write
        self._every_s = every_s
        self._clock = clock
        self._task: int | None = None
        self._began = self._told = 0.0

    def look(self) -> None:
        """Write a line if it is time for one."""
        running = [task for task in self._progress.tasks if not task.finished]
        if not running:
            return
        task, now = running[-1], self._clock()
        if task.id != self._task:
            self._task, self._began = task.id, now
        elif now - self._told < self._every_s:
            return
        self._told = now
        self._write(_line(task, now - self._began)[:80])


def _line(task: Task, seconds: float) -> str:
    unit = task.fields.get("unit", "")
    return f"{task.description}: {task.completed:.0f} of {task.total or 0:.0f} {unit}, {seconds:.0f} s"
