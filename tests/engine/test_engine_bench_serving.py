"""`python -m benchmarks serve serve-tiny`, cut short: real servers and vLLM's own client, on vLLM's CPU platform."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import caches
from benchmarks.arms import expected_length
from benchmarks.plans.serving import serve_tiny
from benchmarks.serving.plan import ServeLoad
from benchmarks.serving.results import ServeFile, engines, faults, read_served, starts, summarise, unlike
from benchmarks.serving.run import ServeRunner

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("cpu_platform")]


def test_two_servers_are_measured_in_turns_with_stocks_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(caches.CACHE_ROOT, str(tmp_path / "compiled"))
    tiny = serve_tiny()
    arms = tuple(arm for arm in tiny.arms if arm.name != "noop")
    loads = (ServeLoad("rate-8", rate=8.0), ServeLoad("closed-4", concurrency=4, each_second=16.0))
    plan = dataclasses.replace(tiny, arms=arms, loads=loads, turns=2, seconds=1.0, sampled=32, audited=("closed-4",))
    for arm in arms:
        caches.mark(arm.to_dict(), served=True)  # the servers start side by side
    lines: list[str] = []
    path = tmp_path / "served.json"
    runner = ServeRunner(plan, ServeFile(path, plan), command="a command", envs={}, cache=tmp_path, report=lines.append)
    assert runner.run(), lines
    found = read_served(path)
    assert found["failures"] == []
    rows = summarise(found)
    assert [(row["load"], row["arm"], row["n"]) for row in rows] == [
        (load.name, arm, 2) for load in loads for arm in ("stock", "plugin")
    ]
    for row in rows:
        assert row["ttft"]["p99"]["low"] > 0
        assert row["acceptance_length"]["median"] == pytest.approx(expected_length(0.7, 3), rel=0.2)
    assert unlike(found, "plugin")["greedy"] == 0
    assert found["tokens"]["stock"]["seeded"]["unlike_greedy"] > 16
    assert all("greedy" not in fault for fault in faults(found))
    facts = engines(found)
    assert (facts["stock"]["plugin"], facts["plugin"]["plugin"]) == ("not loaded", "on")
    assert facts["plugin"]["scheduler"]["prefix_caching"]
    assert facts["plugin"]["async_scheduling"]
    assert (facts["stock"]["backends"], facts["stock"]["runner"]) == (["CPU_ATTN"], "V1")
    assert [(start["arm"], start["beside"]) for start in starts(found)] == [("stock", 2), ("plugin", 2)]
    assert all(start["seconds"] > 1 for start in starts(found))
    (audit,) = found["audits"]
    assert (audit["arm"], audit["load"]) == ("plugin", "closed-4")
    assert audit["overlapped"][0] + audit["critical"][0] > 0  # a CPU has reads, and no times
