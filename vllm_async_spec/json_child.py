"""A child process that answers in lines of JSON: `start` is the parent's side, `serve` and `answering` the child's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

_TELLING = re.compile(r"\b\w*(Error|Exception|Killed|Segmentation fault)\b")


@dataclass(frozen=True, slots=True)
class Child:
    """A started child process; `start` describes the fields."""

    process: subprocess.Popen[str]
    log: Path
    fail: Callable[[str], Exception]
    ready_s: float | None
    answer_s: float | None

    def wait_until_ready(self) -> None:
        """Wait until the child takes commands. Raises what `ask` raises."""
        self.answer(self.ready_s)

    def ask(self, command: str, **arguments: Any) -> Answer:
        """Send a command and return the answer.

        Raises:
            Exception: made by `fail`: the command failed, the process ended, or no answer came in time.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child has ended; its last answer, or its log, says why
            self.process.stdin.write(json.dumps({"command": command} | arguments) + "\n")
            self.process.stdin.flush()
        return self.answer(self.answer_s)

    def answer(self, seconds: float | None = None) -> Answer:
        """The next answer; kills the process after `seconds` without an answer. Raises what `ask` raises."""
        assert self.process.stdout is not None
        late = threading.Timer(seconds or 0, self.process.kill)
        if seconds is not None:
            late.start()
        line = self.process.stdout.readline()
        timed_out = seconds is not None and not late.is_alive()
        late.cancel()
        if line:
            answer: Answer = json.loads(line)
            if "error" not in answer:
                return answer
            why = answer["error"]
        elif timed_out:
            why = f"the process gave no answer for {seconds:.0f} s"
        else:
            why = f"the process ended with exit code {self.process.wait()}: {last_telling_line(self.log)}"
        raise self.fail(f"{why} (log: {self.log})")


@contextlib.contextmanager
def start(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    fail: Callable[[str], Exception],
    cwd: Path | None = None,
    ready_s: float | None = None,
    answer_s: float | None = None,
    end_s: float | None = 30.0,
) -> Iterator[Child]:
    """Run a child process while the context lasts.

    Args:
        command: the command line.
        log: file for its standard error.
        env: its environment variables.
        fail: makes the exception from the reason, which ends with the log's path.
        cwd: its working directory; this process's if None.
        ready_s: seconds until the child must be ready; None for no limit.
        answer_s: seconds until the child must answer a command; None for no limit.
        end_s: seconds for the child to exit by itself, which completes its log and frees the device; None for no limit.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=cwd
        )
        try:
            yield Child(process, log, fail, ready_s, answer_s)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(timeout=end_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_telling_line(log: Path) -> str:
    """The last line of a log that names an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if _TELLING.search(line)), lines[-1] if lines else "the log is empty")


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Answer], None]]:
    """Reserve standard output for answers; everything else that is printed goes to standard error.

    Yields:
        A function that writes an answer. An exception that leaves the context is the last answer.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: Answer) -> None:
        print(json.dumps(what), file=answers)

    try:
        yield answer
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise


def serve(make: Callable[[], object], *commands: str) -> None:
    """Run the commands from standard input until its end.

    Args:
        make: makes the object whose methods run the commands.
        commands: names of these methods.
    """
    with answering() as answer:
        made = make()
        methods = {name: getattr(made, name) for name in commands}
        answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            answer(methods[request.pop("command")](**request))
