"""A child process that answers in lines of JSON: `start` is the parent's side, `serve` and `answering` the child's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_async_spec.engine_log import last_error, names_no_cause
from vllm_async_spec.process_group import LIFELINE, end_group, end_with_parent

Answer = dict[str, Any]


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
        late.daemon = True  # or the end of an interrupted process would wait for its thread
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
            if names_no_cause(why):
                why = last_error(self.log)
        elif timed_out:
            why = f"the process gave no answer for {seconds:.0f} s"
        else:
            why = f"the process ended {_how(self.process.wait())}: {last_error(self.log)}"
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
    """Run a child process while the context lasts; the processes that it starts end with it.

    An interrupt of this process ends them at once. They also end if this process is killed.

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
    with log.open("w") as stderr, _lifeline() as descriptor:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=dict(env) | {LIFELINE: str(descriptor)},
            cwd=cwd,
            pass_fds=(descriptor,),
            start_new_session=True,
        )
        interrupted = False
        try:
            yield Child(process, log, fail, ready_s, answer_s)
        except (KeyboardInterrupt, SystemExit):
            interrupted = True
            raise
        finally:
            assert process.stdin is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                if not interrupted:
                    process.wait(timeout=end_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            finally:
                end_group(process.pid)
                process.wait()


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """The reading end of a pipe that no process but this one holds open."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _how(exit_code: int) -> str:
    """How a process ended, after "ended"."""
    if exit_code == -signal.SIGKILL:
        return "by SIGKILL, which the kernel sends when memory runs out"
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Answer], None]]:
    """Reserve standard output for answers; everything else that is printed goes to standard error.

    From here on, this process and those that it starts end with the parent.

    Yields:
        A function that writes an answer. An exception that leaves the context is the last answer.
    """
    end_with_parent()
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
    """Run the methods named `commands` of what `make` makes, as standard input asks, until its end."""
    with answering() as answer:
        made = make()
        methods = {name: getattr(made, name) for name in commands}
        answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            answer(methods[request.pop("command")](**request))
