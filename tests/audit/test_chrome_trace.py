"""A report's timeline as a trace that Perfetto and chrome://tracing open."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import audit_reports
import pytest
from typer.testing import CliRunner

from vllm_async_spec.audit.chrome_trace import NO_TIMES, chrome_trace
from vllm_async_spec.audit.report import Report
from vllm_async_spec.cli import app

WAITING, FLOWING = audit_reports.waiting(), audit_reports.flowing()


def trace(report: Report = WAITING, before: Report | None = None) -> dict[str, Any]:
    text = chrome_trace(report, before)
    assert text is not None
    made: dict[str, Any] = json.loads(text)
    return made


def spans(made: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in made["traceEvents"] if event["ph"] == "X"]


def track_names(made: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in made["traceEvents"]
        if event["name"] == "thread_name"
    }


def test_every_event_has_the_fields_of_the_format():
    made = trace(FLOWING, WAITING)
    assert made["displayTimeUnit"] == "ms"
    for event in made["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
    for event in spans(made):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in track_names(made)


def test_every_block_of_the_timeline_is_a_span_of_its_track():
    made, timeline = trace(), WAITING.timeline
    assert timeline is not None
    names = track_names(made)
    assert [*names.values()] == ["steps", *(lane.name for lane in timeline.lanes)]
    drawn = [(names[span["pid"], span["tid"]], span["cat"], span["ts"], span["dur"]) for span in spans(made)]
    wanted = [(lane.name, item.kind, item.start_us, item.us) for lane in timeline.lanes for item in lane.items]
    ends = (*timeline.steps_us[1:], timeline.us)
    wanted += [("steps", "step", start, end - start) for start, end in zip(timeline.steps_us, ends, strict=True)]
    assert sorted(drawn) == sorted(wanted)


def test_a_wait_has_its_line_and_says_whether_it_is_critical():
    waits = {span["name"]: span["args"] for span in spans(trace()) if span["cat"] == "wait"}
    assert waits["critical wait: copy to host"] == {"where": str(audit_reports.PLAN)}
    assert waits["wait: pageable copy"] == {"where": str(audit_reports.INDPTR)}


def test_spans_of_a_host_thread_nest_as_perfetto_needs():
    made = trace()
    for track in track_names(made):
        open_until: list[float] = []
        mine = [span for span in spans(made) if (span["pid"], span["tid"]) == track]
        for span in sorted(mine, key=lambda span: (span["ts"], -span["dur"])):
            while open_until and open_until[-1] <= span["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or span["ts"] + span["dur"] <= open_until[-1] + 1e-6
            open_until.append(span["ts"] + span["dur"])


def test_before_and_after_are_two_processes():
    made = trace(FLOWING, WAITING)
    processes = {
        event["pid"]: event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"
    }
    assert [name.partition(":")[0] for name in processes.values()] == ["before", "after"]
    assert made["otherData"]["before"]["headline"] == WAITING.headline


@pytest.mark.parametrize(
    ("report", "before"),
    [
        (audit_reports.simulated(), None),
        (replace(audit_reports.simulated(), timeline=WAITING.timeline), None),
        (replace(WAITING, timeline=None), replace(FLOWING, timeline=None)),
    ],
)
def test_a_report_without_times_has_no_trace(report: Report, before: Report | None):
    assert chrome_trace(report, before) is None


def test_a_trace_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_async_spec.audit.launch.audit_server", lambda *arguments, **more: WAITING)
    file = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["audit", "--url", "http://x", "--trace", str(file)])
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text()) == trace()


@pytest.mark.parametrize("how", ["--model", "--url"])
def test_an_audit_on_a_cpu_says_that_it_has_no_times(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("vllm_async_spec.audit.launch.audit_server", lambda *_, **more: audit_reports.simulated())
    file = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["audit", how, "http://x", "--trace", str(file)])
    assert done.exit_code == (2 if how == "--model" else 1)
    assert done.stderr.splitlines()[-1] == f"vllm-async-spec: {NO_TIMES}"
    assert not file.exists()
    assert ("critical waits" in done.stdout) == (how == "--url")  # with --model no work was started
