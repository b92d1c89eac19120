"""Runs a command that starts an engine of any number of ranks, and ends it when it makes no progress.

Progress is new output, or a compiler that runs. The failure holds the Python stacks of all processes.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from command_line import python_path

from vllm_async_spec.process_group import end_group

SILENT_S = 120.0
"""Seconds without new output after which a start has hung."""
WAITING = ("No available shared memory broadcast block found", "Waiting for ")
"""Parts of the lines that vLLM repeats while it waits for another process; such a line is no progress."""

COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cc1plus"})
"""Programs that compile a kernel for minutes without output; while one runs, there is progress."""

_DUMPS = Path(__file__).with_name("stack_dumps")
_POLL_S = 0.2
_DUMP_S = 5.0
"""Seconds for all processes to write their stacks."""


class HungError(AssertionError):
    """A command made no progress; the message has the end of its log and the stacks of its processes."""


class Watched:
    """A running command; its log and the files of its stacks lie in one folder."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.log = log
        self.silent_s = silent_s
        self._stacks = log.with_suffix(".stacks")
        self._stacks.mkdir()
        given = dict(os.environ if environment is None else environment)
        path = python_path(_DUMPS, inherited=given)
        given |= {"PYTHONPATH": path, "STACK_DUMPS": str(self._stacks), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=given, start_new_session=True
            )

    def wait_until(self, reached: Callable[[], bool]) -> None:
        seen, since = 0, time.monotonic()
        while self.process.poll() is None and not reached():
            written = progress(self.text())
            if written != seen or self.compiles():
                seen, since = written, time.monotonic()
            elif time.monotonic() - since > self.silent_s:
                raise HungError(
                    f"no progress for {self.silent_s:g} s; the end of the log:\n{self.text()[-2000:]}\n"
                    f"{self._all_stacks()}"
                )
            time.sleep(_POLL_S)

    def wait(self) -> int:
        self.wait_until(lambda: False)
        return self.process.wait()

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[int]:
        """Identifiers of the Python processes that the command started, itself included, ended or not."""
        return [int(file.name) for file in sorted(self._stacks.iterdir())]

    def compiles(self) -> bool:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # ended meanwhile
                name, _, fields = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
                session = int(fields.split()[3])
                if session == self.process.pid and name in COMPILERS:
                    return True
        return False

    def end(self) -> None:
        end_group(self.process.pid)
        self.process.wait()

    def _all_stacks(self) -> str:
        files = {self._stacks / str(pid): Path(f"/proc/{pid}/cmdline") for pid in self.processes()}
        # A signal that no handler takes would end the process: only the owners of a file have the handler.
        for file in files:
            with suppress(ProcessLookupError):
                os.kill(int(file.name), signal.SIGUSR1)
        end = time.monotonic() + _DUMP_S
        before: dict[Path, int] = {}
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            sizes = {file: file.stat().st_size for file in files}
            if all(sizes.values()) and sizes == before:
                break
            before = sizes
        parts = []
        for file, title in files.items():
            with suppress(OSError):  # ended before
                name = title.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
                stacks = file.read_text(encoding="utf-8", errors="replace")
                parts.append(f"--- process {file.name} ({name}):\n{stacks or 'wrote no stacks'}")
        return "\n".join(parts)


def progress(log: str) -> int:
    """Characters of the log, without the lines of processes that wait. A progress bar goes on in its line."""
    return sum(len(line) for line in log.splitlines() if not any(part in line for part in WAITING))


@contextmanager
def watched(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    silent_s: float = SILENT_S,
) -> Iterator[Watched]:
    running = Watched(command, log, environment, silent_s)
    try:
        yield running
    finally:
        running.end()
