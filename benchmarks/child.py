"""The process of one arm's engine, from outside: start it, ask it, and say in one sentence why it died."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Plugin
from benchmarks.loads import Load

ROOT = Path(__file__).resolve().parents[1]

_MODES = {Plugin.STOCK: {}, Plugin.NOOP: {"VLLM_ASYNC_SPEC": "off"}, Plugin.ON: {"VLLM_ASYNC_SPEC": "auto"}}
_START_SECONDS, _ANSWER_SECONDS = 600.0, 900.0
_TELLING = re.compile(r"\b\w*(Error|Exception|Killed|Segmentation fault)\b")


class ChildError(RuntimeError):
    """The engine's process failed; the message says at what, and where its log is."""


class Child:
    """A started engine."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name, self._process, self._log = name, process, log

    def wait_until_ready(self) -> None:
        """Wait for the engine.

        Raises:
            ChildError: it does not come up.
        """
        self._answer(_START_SECONDS)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have `command` carried out.

        Raises:
            ChildError: it fails, or the process ends over it.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its log says why
            self._process.stdin.write(json.dumps({"command": command} | arguments) + "\n")
            self._process.stdin.flush()
        return self._answer(_ANSWER_SECONDS)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(seconds, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        timed_out = not late.is_alive()
        late.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            if "error" not in answer:
                return answer
            why = answer["error"]
        elif timed_out:
            why = f"it gave no answer for {seconds:.0f} s"
        else:
            why = f"it ended with {self._process.wait()}: {last_telling_line(self._log)}"
        raise ChildError(f"the engine of {self._name!r} failed: {why} (log: {self._log})")


def last_telling_line(log: Path) -> str:
    """The last line of a log that names an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if _TELLING.search(line)), lines[-1] if lines else "its log is empty")


@contextlib.contextmanager
def start(
    arm: Arm, loads: Sequence[Load], *, audit: bool, env: Path | None, models: Path, log: Path
) -> Iterator[Child]:
    """The process of an arm's engine, for as long as the context lasts.

    Args:
        arm: what to serve with.
        loads: what it is going to be asked to run.
        audit: whether it can be asked for audits.
        env: a shell file to source first, or another Python; None for this one.
        models: folder for the directories of models.
        log: where its log goes.
    """
    setup = {"arm": arm.to_dict(), "loads": [asdict(load) for load in loads], "models": str(models.resolve())}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*interpreter(env), "-m", "benchmarks.engine", json.dumps(setup)],
            cwd=ROOT,
            env=environment(arm, os.environ, audit=audit),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            yield Child(arm.name, process, log)
        finally:
            _end(process)


def interpreter(env: Path | None) -> list[str]:
    """The beginning of a command line that runs Python in an environment."""
    if env is None:
        return [sys.executable]
    if env.name.startswith("python"):
        return [str(env)]
    return ["bash", "-c", 'source "$0" && exec python3 "$@"', str(env)]


def environment(arm: Arm, inherited: Mapping[str, str], *, audit: bool = False) -> dict[str, str]:
    """Of an arm's process: nothing of vLLM's settings or ours comes from the caller, only from the arm."""
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    runner = {} if arm.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": "1" if arm.runner == "V2" else "0"}
    agent = {"VLLM_ASYNC_SPEC_AUDIT": "1"} if audit else {}
    kept = {name: value for name, value in inherited.items() if not name.startswith(("VLLM_", "ASYNC_SPEC_"))}
    return kept | common | runner | agent | _MODES[arm.plugin] | dict(arm.environment)


def _end(process: subprocess.Popen[str]) -> None:
    """Let it end by itself, so that the next one finds the device free, but not for long."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
