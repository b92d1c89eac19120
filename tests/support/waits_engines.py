"""Stands in for the engines of `benchmarks.waits`: remembers what was asked, and answers as it is told to."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.arms import Arm
from benchmarks.child import ChildError
from benchmarks.waits.cases import CASES

FACTS = {
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "runner": "V2",
    "backends": ["FLASH_ATTN"],
    "compilation": "VLLM_COMPILE",
    "graphs": "FULL_AND_PIECEWISE",
    "async_scheduling": True,
    "prefix_caching": True,
    "hardware": {"device": "a device"},
}
AUDIT = {
    "host_idle": 0.21,
    "plain_idle": 0.2,
    "launch_gaps": 0.01,
    "busy": 0.78,
    "critical": [1.5, 0.3],
    "sites": [["worker/gpu_model_runner.py:10 in sample", "read", 1.0], ["sample/ops.py:7 in topk", "event", 0.5]],
    "overlapped": [1.0, 0.1],
    "recording": [1.01, 1.2],
}


@dataclass
class Engines:
    started: list[Arm] = field(default_factory=list)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Engine, command and case."""
    killed: list[str] = field(default_factory=list)
    audits: set[bool] = field(default_factory=set)
    fails_to_start: dict[str, str] = field(default_factory=dict)
    """By engine, what its process said last."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By case, in place of runs."""
    dies: set[tuple[str, str]] = field(default_factory=set)
    """Commands and cases over which an engine dies, each once."""
    before: Callable[[str, str], None] = lambda command, case: None
    """Called before each command."""

    @contextlib.contextmanager
    def start(
        self, arm: Arm, loads: Any, *, audit: bool, models: Path, more: dict[str, Any], **_: Any
    ) -> Iterator[Any]:
        self.started.append(arm)
        self.audits.add(audit)
        assert more == {"kind": arm.name}
        assert models.name == f"waits-{arm.name}"
        yield _Engine(self, arm.name)


@dataclass
class _Engine:
    engines: Engines
    name: str

    @property
    def process(self) -> Any:
        return SimpleNamespace(kill=lambda: self.engines.killed.append(self.name), stdin=None)

    def wait_until_ready(self) -> None:
        if said := self.engines.fails_to_start.get(self.name):
            raise ChildError(f"the engine of {self.name!r} failed: {said} (log: logs/{self.name}.log)")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        if command == "describe":
            return FACTS
        case = arguments["case"]
        self.engines.before(command, case)
        assert CASES[case].engine == self.name
        self.engines.asked.append((self.name, command, case))
        if (command, case) in self.engines.dies:
            self.engines.dies.remove((command, case))
            raise ChildError(f"the engine of {self.name!r} failed: out of luck")
        if command == "audit_case":
            return AUDIT
        step_ms = 2.0 if CASES[case].reference is None else 3.0
        return self.engines.answers.get(case) or {"runs": [[step_ms, 50, 1.0]] * 2}
