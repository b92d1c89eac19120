"""Host time by phase: what a result keeps of an audit, and the table of all audits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from bench_documents import FACTS, PLAN, document

from benchmarks.audit_tables import host_time_grid, ranks_grid
from benchmarks.audited import host_time
from benchmarks.results import ResultFile
from vllm_async_spec.audit.report import Cause, Frame, Overhead, Phase, PhaseTime, Place, Report, Spread, WaitKind


def report() -> Report:
    def cause(kind: WaitKind, per_step: float, ms: float) -> Cause:
        stack = (Frame("vllm/v1/worker/gpu_model_runner.py", 7, "f"),)
        return Cause(kind, Place.OVERLAPPED, "worker", Phase.INPUTS, stack, per_step, ms, ms)

    spread = Spread(32, 2.0, 1.9, 2.2)
    made: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Report))
    return Report(
        **made
        | {
            "steps": 32,
            "overhead": Overhead(spread, spread, dataclasses.replace(spread, median=3.0)),
            "causes": (cause(WaitKind.PAGEABLE, 2.0, 0.1), cause(WaitKind.EVENT, 1.0, 0.4)),
            "phases": (
                PhaseTime(Phase.INPUTS, "worker", 1.5, 0.5, 24.0),
                PhaseTime(Phase.LAUNCH, "worker", 0.25, 0.0, 4.1),
                PhaseTime(Phase.OUTPUT, "output thread", 9.0, 0.0),
            ),
        }
    )


def test_a_digest_has_the_launching_threads_time_without_its_waits():
    assert host_time(report()) == {
        "step_ms": 2.0,
        "phases": {"input preparation": 1.0, "launch": 0.25},
        "stalls": {"launch": 4.1},  # of 8 ms; the other has 24 of 48, which is not more than half
        "waiting_ms": 0.5,
        "pageable": [["worker/gpu_model_runner.py:7 in f", 2.0, 0.1]],
    }


def test_a_cpu_has_no_times():
    on_a_cpu = dataclasses.replace(report(), overhead=None, phases=(), causes=())
    assert host_time(on_a_cpu) == {"step_ms": None, "phases": {}, "stalls": {}, "waiting_ms": 0, "pageable": []}


def audit(step_ms: float | None, *sites: list[Any]) -> dict[str, Any]:
    return host_time(report()) | {"step_ms": step_ms, "critical": [1.0, 0.2], "plain_idle": 0.031, "sites": [*sites]}


def test_the_table_of_ranks_says_which_waits_and_where(tmp_path: Path):
    found = document({arm.name: [100, 101, 102, 100] for arm in PLAN.arms})
    for arm in found["plan"]["arms"]:
        arm["engine"] = {"tensor_parallel_size": 2}
    turn = next(turn for turn in found["turns"] if turn["arm"] == "noop")
    turn["audits"] = {"mixed, rank 1": audit(5.0, ["a.py:1 in f", "event", 1.0]), "mixed": audit(4.0)}
    (tmp_path / "result.json").write_text(json.dumps(found))
    head, rows = dataclasses.astuple(ranks_grid(tmp_path))
    assert head[-5:] == ("rank", "ms a step", "critical waits a step", "lines that wait", "idle")
    assert [row[-7:] for row in rows] == [
        ("mixed", "noop", "0", "4.00", "1.00", "none", "3%"),
        ("mixed", "noop", "1", "5.00", "1.00", "`a.py:1 in f` 1.00", "3%"),
    ]
    assert not host_time_grid(tmp_path).rows


def test_the_table_has_a_row_for_each_audit_on_a_gpu_by_release_and_load(tmp_path: Path):
    for number, release in enumerate(("0.28.0", "0.9.1")):
        found = document({arm.name: [100, 101, 102, 100] for arm in PLAN.arms})
        for turn in found["turns"]:
            turn["facts"] = FACTS | {"vllm": release}
        turns = {turn["arm"]: turn for turn in found["turns"]}
        turns["plugin"]["audits"] = {"mixed": audit(5.0), "decode-1": audit(2.0)}
        turns["plugin"]["audits"]["mixed"]["phases"]["garbage collection"] = 0.5
        turns["noop"]["audits"] = {"decode-1": audit(4.0), "mixed": audit(None)}
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    shape = PLAN.arms[0].shape
    loads = [load.name for load in PLAN.loads]
    assert loads.index("decode-1") < loads.index("mixed")
    head, rows = dataclasses.astuple(host_time_grid(tmp_path))
    assert [row[:6] for row in rows] == [
        (f"{release}, V1", "a device", shape, load, arm, step_ms)
        for release in ("0.9.1", "0.28.0")
        for load, arm, step_ms in (
            ("decode-1", "noop", "4.00"),
            ("decode-1", "plugin", "2.00"),
            ("mixed", "plugin", "5.00"),
        )
    ]
    assert dict(zip(head, rows[0], strict=True)) | {
        "input preparation": "1.00",
        "launch": "0.25 (4 in one step)",
        "garbage collection": "0.00",  # which another row has
        "critical waits": "1.00",
        "pageable copies": "2.0",
        "idle": "3%",
    } == dict(zip(head, rows[0], strict=True))
    assert "drafting" not in head


def test_a_stored_result_keeps_its_audits(tmp_path: Path):
    result = ResultFile(tmp_path / "result.json", PLAN)
    result.add({"pass": 0, "arm": "noop", "facts": FACTS, "loads": {}, "audits": {"decode-1": audit(2.0)}}, "command")
    again = ResultFile(tmp_path / "result.json", PLAN)
    assert again.turns[0]["audits"]["decode-1"]["phases"] == {"input preparation": 1.0, "launch": 0.25}
