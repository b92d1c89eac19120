"""What became of each case of one file, a line of JSON each; written as it happens, so that a crash loses nothing."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

_VARYING = (
    # Which processes have ended already when an engine that can't start is given up is a race.
    (re.compile(r"(Failed core proc\(s\)): \{.*?\}"), r"\1: {}"),
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (re.compile(r"/tmp/[^\s'\"]+"), "/tmp/"),
    (re.compile(r"\d+"), "0"),
)


class Recorder:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._phases: list[tuple[str, str]] = []
        self._seen: dict[str, int] = {}
        self.write({"plugin": plugin_state()})

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            how = "not collected" if report.failed else "skipped"
            self.write({"case": report.nodeid, "outcome": how, "detail": _detail(report)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (phase := _phase(report)) is not None:
            self._phases.append((phase, _detail(report)))
        if report.when == "teardown":
            self._seen[report.nodeid] = seen = self._seen.get(report.nodeid, 0) + 1
            outcome = " and ".join(phase for phase, _ in self._phases) or "passed"
            detail = "; ".join(detail for _, detail in self._phases if detail)
            case = report.nodeid if seen == 1 else f"{report.nodeid} #{seen}"
            self.write({"case": case, "outcome": outcome, "detail": detail})
            self._phases.clear()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write({"plugin": plugin_state()})
        self.write({"end": int(exitstatus)})


def plugin_state() -> dict[str, str] | None:
    """State of each patch in this process; None where vLLM has not loaded the plugin, whatever was imported of it."""
    module = sys.modules.get("vllm_async_spec.vllm_plugin.plugin")
    plugin = module.active_plugin() if module else None
    if plugin is None:
        return None
    outcomes = plugin.ledger.outcomes if plugin.ledger else {}
    return {name: outcome.state.value for name, outcome in outcomes.items()}


def _phase(report: pytest.TestReport) -> str | None:
    if report.failed:
        return "failed" if report.when == "call" else f"failed in {report.when}"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    return "xpassed" if report.when == "call" and hasattr(report, "wasxfail") else None


def _detail(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The error's first line or the reason of the skip, without what differs from run to run."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        text = str(longrepr[2])
    elif (crash := getattr(longrepr, "reprcrash", None)) is not None:
        text = str(crash.message)
    else:
        lines = [line for line in str(longrepr or "").splitlines() if line.startswith("E ")]
        text = lines[-1] if lines else str(longrepr or "")
    first = next(iter(text.splitlines()), "")[:300]
    for pattern, constant in _VARYING:
        first = pattern.sub(constant, first)
    return first
