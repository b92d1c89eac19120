"""Audits of a served plan: each in a server of its own, after all loads; nothing of vLLM runs."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from bench_command import bench
from served import PLAN, Fakes, rows_of

from benchmarks.serving import run
from benchmarks.serving.results import starts
from benchmarks.serving.table import serve_notes
from vllm_async_spec.audit.engine import AuditError

AUDITED = dataclasses.replace(PLAN, audited=("closed-4",))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def audit(url: str, **options: Any) -> dict[str, Any]:
        asked.append(options | {"requests": len(Path(options["load"]).read_text().splitlines())})
        return {"plain_idle": 0.25, "critical": [1.0, 0.2], "sites": []}

    monkeypatch.setattr(run, "audit_server", audit)
    monkeypatch.setattr(run, "digest", lambda report: report)
    phases = {"agreement of engines": 0.5, "planning": 1.0}
    monkeypatch.setattr(run, "host_time", lambda report: {"step_ms": 8.0, "phases": phases})
    return asked


def test_audits_come_last_each_in_a_server_of_its_own(fakes: Fakes, audits: list[dict[str, Any]]):
    done, _, lines = fakes.run(AUDITED, budget=50)
    assert not done  # a server and its audit would take longer
    assert lines[-1] == "steps left: 2; run the same command again for them"
    assert not audits
    done, result, lines = fakes.run(AUDITED, budget=200)
    assert done
    assert all(asked["seconds"] <= 50 for asked in audits)
    last = [event for event in fakes.events if event.startswith("start")][3:]
    assert last == ["start noop with the agent", "start plugin with the agent"]
    assert [(asked["batch"], asked["requests"]) for asked in audits] == [(4, 4)] * 2
    assert lines[-1].startswith("2/2 plugin, closed-4, audit: 1.00 critical waits a step, host-caused idle 25% (")
    idle = {(row["load"], row["arm"]): row["host-caused idle"] for row in rows_of(result)}
    assert {place: share for place, share in idle.items() if share != "-"} == {
        ("closed-4", "noop"): "25%",
        ("closed-4", "plugin"): "25%",
    }
    agreed = "closed-4: a step agrees with the other engines for 0.50 ms, and takes 8.00 ms where nothing is recorded"
    notes = [note for note in serve_notes(result.document) if "agrees" in note]
    assert notes == [f"{arm}, {agreed}, of which the GPU is idle for 25%." for arm in ("noop", "plugin")]
    assert len(starts(result.document)) == 3  # an agent may slow a start
    moved = copy.deepcopy(result.document)
    server = moved["sessions"][0]["servers"]["noop"]
    elsewhere = copy.deepcopy(server) | {"facts": server["facts"] | {"hardware": {"device": "another"}}}
    moved["sessions"].append({"servers": {"noop": elsewhere}})
    moved["audits"][0]["session"] = len(moved["sessions"]) - 1
    notes = [note for note in serve_notes(moved) if "audited" in note]
    assert notes == ["noop, closed-4: host-caused idle 25%, audited on machine 2."]
    assert fakes.run(AUDITED)[0]
    assert len(audits) == 2
    logs = {path.stem for path in fakes.folder.rglob("made-up-*.log")}
    assert {f"made-up-{arm}{end}" for arm in ("noop", "plugin") for end in ("", "-audit")} <= logs


def test_a_failed_audit_is_one_sentence_and_keeps_the_rest(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    def audit(*_: Any, **__: Any) -> None:
        raise AuditError("the engine answered nothing")

    monkeypatch.setattr(run, "audit_server", audit)
    _, result, _ = fakes.run(AUDITED)
    assert [(each["arm"], each["error"]) for each in result.document["failures"]] == [
        ("noop", "the engine answered nothing"),
        ("plugin", "the engine answered nothing"),
    ]
    assert len(result.document["measured"]) == 6 * len(PLAN.loads)


def test_a_run_without_audits_starts_no_server_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(run.ServeRunner, "run", lambda self, **_: not asked.append(self._plan.audited))
    for option in ("--audit", "--no-audit"):
        arguments = ["serve", "serve-tiny", "--out", str(tmp_path), "--cache", str(tmp_path), option]
        assert bench(*arguments).exit_code == 0
    assert asked == [("closed-8",), ()]
