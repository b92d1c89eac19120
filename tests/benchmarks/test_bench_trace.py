"""Timelines of the techniques."""

import contextlib
import itertools
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_command import bench
from traces import MAIN, OTHER, Recording

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

from generating import make_batches_late

from benchmarks import tracing
from benchmarks.arms import expected_length
from benchmarks.batching_models import SHARE
from benchmarks.middle import Middle, MiddleError, before_each, record_middle
from benchmarks.results import FIGURES, RESULTS, figure_of, read_trace, trace_files
from vllm_async_spec.audit.cpu_waits import AuditedCpuEvent
from vllm_async_spec.audit.report import Place

ABOUT = {
    "trace": "stopping",
    "title": "Made up",
    "model": "tiny",
    "batch": 1,
    "transformers": "5.19.0",
    "device": "a GPU",
}
STEP_US = 100


def synchronous(kernels: int = 4) -> Recording:
    """Steps of 100 µs: kernels from 10 on, 10 µs apart; then the host waits for a copy until 60, and thinks."""
    made = Recording()
    for step in range(-2, 8):
        at = step * STEP_US
        for index in range(kernels):
            made.kernel(at + 10 + 40 * index / kernels, 5, launched=at + 2 + index)
        made.copy(at + 50, 1, "DtoH (Device -> Pinned)", 1, at=at + 55)
        made.runtime("cudaStreamSynchronize", at + 51, 9)
        made.call("warning", at + 61, at + 61, 7)
    return made


def asynchronous() -> Recording:
    """The same kernels, back to back, launched a step before; the host waits for an event while they run."""
    made = Recording()
    for step in range(-2, 8):
        at = step * STEP_US
        for index, (start, us) in enumerate([(-5, 24.5), (20, 19.5), (40, 19.5), (80, 10)]):
            made.kernel(at + start, us, launched=at + index - STEP_US)
        made.kernel(at + 62, 2, launched=at - 90, stream=20)
        made.runtime("cudaEventSynchronize", at + 30, 40)
        made.call("event", at + 29, at + 71, 8)
        made.runtime("cudaLaunchKernel", at + 75, 2, OTHER)
        made.runtime("cudaStreamSynchronize", at + 10, 30, OTHER)
        made.call("warning", at + 41, at + 41, 9, OTHER)
    return made


def middle(made: Recording, folder: Path, name: str) -> Middle:
    return Middle(made.load(folder, [STEP_US * step for step in range(7)], name))


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    middles = {
        "synchronous": middle(synchronous(), tmp_path, "one"),
        "asynchronous": middle(asynchronous(), tmp_path, "two"),
    }
    return tracing.reduced(ABOUT, middles, steps=2)


def test_the_steps_in_the_middle_become_blocks(found: dict[str, Any]):
    arm = found["arms"]["synchronous"]
    assert (arm["us"], arm["steps_us"], arm["recorded_steps"], arm["step_us"]) == (200, [0, 100], 6, 100)
    host, stream = arm["rows"]
    assert (host["name"], stream["name"]) == ("host", "stream 7")
    # Launches a microsecond apart and a microsecond long are one; so is the copy's call with the wait that follows it.
    assert host["blocks"]["call"] == [[2, 4], [102, 4]]
    assert host["blocks"]["critical"] == [[50, 10], [150, 10]]
    assert "overlapped" not in host["blocks"]
    assert stream["blocks"]["kernels"] == [[at + 10 * index, 5] for at in (0, 100) for index in (1, 2, 3, 4)]
    assert stream["blocks"]["copies"] == [[55, 1], [155, 1]]
    assert arm["gpu_busy"] == pytest.approx(0.21)
    assert (arm["critical_waits"], arm["overlapped_waits"]) == (1, 0)


def test_a_wait_while_the_device_works_is_another_one_and_other_threads_are_left_out(found: dict[str, Any]):
    arm = found["arms"]["asynchronous"]
    host, stream, other = arm["rows"]
    assert host["blocks"]["overlapped"] == [[30, 40], [130, 40]]
    assert host["blocks"]["call"] == [[0, 4], [10, 1], [100, 4], [110, 1]]
    assert "critical" not in host["blocks"]
    assert (arm["critical_waits"], arm["overlapped_waits"]) == (0, 1)
    # Half a microsecond between kernels is not seen; twenty are. What began before the window is cut.
    assert stream["blocks"]["kernels"] == [[0, 60], [80, 10], [95, 64], [180, 10], [195, 5]]
    assert other == {"name": "stream 20", "blocks": {"kernels": [[62, 2], [162, 2]]}}


def test_waits_are_counted_by_what_they_held_up(tmp_path: Path):
    made = middle(asynchronous(), tmp_path, "two")
    assert made.waits_a_step(Place.CRITICAL) == 0
    assert made.waits_a_step(Place.OVERLAPPED) == 1
    assert {wait.thread for wait in made.recorded.waits} == {MAIN, OTHER}
    assert made.busy() == pytest.approx(0.755)  # 73.5 µs of kernels in one stream, 2 in the other


def test_a_step_that_is_over_before_the_host_asks_is_no_wait(tmp_path: Path):
    made = Recording()
    for step in range(-2, 8):
        at = step * STEP_US
        made.kernel(at + 10, 20, launched=at + 5)
        made.runtime("cudaEventQuery", at + 60, 2)
        if step % 2:  # it was asked a moment too early, and waited for less than a wait is worth
            made.runtime("cudaEventSynchronize", at + 63, 5)
            made.call("event", at + 62, at + 69, 8)
    found = middle(made, tmp_path, "early")
    assert found.waits_a_step(Place.CRITICAL) == 0
    assert found.waits_a_step(Place.OVERLAPPED) == pytest.approx(0.5)
    assert found.busy() == pytest.approx(0.2)


def test_joined_stretches_keep_the_longest_end():
    assert list(tracing.joined([(0, 10), (2, 4), (11, 12), (20, 21)], 2)) == [(0, 12), (20, 21)]
    assert list(tracing.joined([], 2)) == []


def test_a_file_is_never_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    middles = {"synchronous": middle(synchronous(), tmp_path, "one")}
    assert tracing.reduced(ABOUT, middles, 5)["join_us"] == 1
    monkeypatch.setattr(tracing, "LARGEST", 650)
    small = tracing.reduced(ABOUT, middles, 5)
    assert small["join_us"] > 1
    (tmp_path / "small.json").write_text(tracing.as_text(small))
    assert (tmp_path / "small.json").stat().st_size <= 650
    assert small["arms"]["synchronous"]["gpu_busy"] == pytest.approx(0.21)


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_picture_is_drawn_and_always_the_same(form: str, found: dict[str, Any], tmp_path: Path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'vllm-async-spec[bench]'")
    (tmp_path / "made-up.json").write_text(tracing.as_text(found))
    pictures = []
    for _ in range(2):
        done = bench("plot", str(tmp_path / "made-up.json"), "--format", form)
        assert done.exit_code == 0, done.output
        pictures.append((tmp_path / f"made-up.{form}").read_bytes())
    assert pictures[0] == pictures[1]
    if form == "svg":
        text = pictures[0].decode()
        said = ["Made up: tiny, batch 1", "transformers 5.19.0 on a GPU", "asynchronous: 0.10 ms a step", "stream 20"]
        assert all(f"<!-- {each}" in text for each in said)


def test_traces_are_told_from_results(found: dict[str, Any], tmp_path: Path):
    (tmp_path / "trace-stopping.json").write_text(tracing.as_text(found))
    (tmp_path / "other.json").write_text(json.dumps({"schema": 1}))
    assert trace_files(tmp_path) == [tmp_path / "trace-stopping.json"]
    assert figure_of(RESULTS / "trace-stopping.json") == FIGURES / "trace-stopping.svg"
    for path in trace_files():
        found = read_trace(path)
        assert found["trace"] in tracing.TECHNIQUES
        assert len(tracing.as_text(found)) <= tracing.LARGEST


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["waiting"], "the technique is 'waiting'; it must be one of stopping, static, interleaving, batching"),
        (["stopping", "--model", "8b"], "the model is '8b'; of stopping it must be one of tiny, gpt2"),
        (["stopping", "--drafts", "2"], "drafts are 2 and the technique is stopping; only batching uses drafts"),
        (["batching"], "a trace needs a GPU, and PyTorch finds no CUDA device"),
    ],
)
def test_what_can_not_be_recorded_is_refused_in_one_sentence(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = bench("trace", *options, "--out", str(tmp_path / "found.json"))
    assert done.exit_code == (2 if "needs a GPU" in message else 1)
    assert message in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("technique", "drafts", "steps"),
    [("stopping", 0, 48), ("static", 0, 48), ("interleaving", 0, 47), ("batching", 0, 48), ("batching", 3, 48)],
)
def test_each_step_of_both_arms_is_noted(technique: str, drafts: int, steps: int, monkeypatch: pytest.MonkeyPatch):
    """On a CPU, where no arm is ahead of another. With drafts there are about as many steps."""
    monkeypatch.setattr(tracing, "_NEW_TOKENS", 48)
    new_tokens = math.ceil(48 * expected_length(SHARE, drafts))
    assert (new_tokens > 48) == bool(drafts)
    with contextlib.ExitStack() as stack:
        runs = tracing.make_runs(technique, stack, size="tiny", batch=2, device="cpu", drafts=drafts)
        assert tuple(runs) == tracing.ARMS
        for name, run in runs.items():
            seen: list[int] = []
            tokens = run(lambda seen=seen: seen.append(threading.get_ident()))
            assert [len(each) for each in tokens] == [new_tokens if technique == "batching" else 64] * 2
            assert set(seen) == {threading.get_ident()}
            # With drafts it is a matter of luck by a few steps, and the row that has less of it counts.
            assert -4 * bool(drafts) <= len(seen) - steps <= (16 if drafts else 1), name
            recorded = record_middle(run, at_most=6).recorded
            assert recorded.count == 6
            assert recorded.main == threading.get_ident()


def test_arms_that_differ_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    made = {"synchronous": lambda on_step: [[1, 2]], "asynchronous": lambda on_step: [[1, 3]]}
    monkeypatch.setattr(tracing, "_make_batching", lambda *_, **__: made)
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(tracing.TraceError, match="the asynchronous arm generates other tokens than the synchronous"),
    ):
        tracing.make_runs("batching", stack, size="tiny", batch=2, device="cpu", drafts=0)


def test_a_run_that_is_too_short_has_no_middle():
    def run(on_step: Any) -> None:
        for _ in range(15):
            on_step()

    with pytest.raises(
        MiddleError, match="a run of 15 steps has no middle to record; give more new tokens, for at least 16 steps"
    ):
        record_middle(run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is hooked in on a CPU is not on a machine with a GPU")
def test_a_run_that_fails_leaves_nothing_hooked_in():
    runs = itertools.count(1)

    def run(on_step: Any) -> None:
        again = next(runs) == 2
        for _ in range(15 if again else 30):
            on_step()
        if again:
            assert AuditedCpuEvent.waits is not None
            raise KeyError("of the loop itself")

    with pytest.raises(KeyError, match="of the loop itself"):
        record_middle(run)
    assert AuditedCpuEvent.waits is None


def test_a_method_is_as_it_was():
    class Loop:
        def step(self, by: int) -> int:
            return by + 1

    seen: list[str] = []
    loop = Loop()
    for owner in (loop, Loop):
        own = dict(vars(owner))
        with before_each(owner, "step", lambda: seen.append("step")):
            assert loop.step(2) == 3
        assert dict(vars(owner)) == own
    assert seen == ["step", "step"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("technique", "drafts"), [("stopping", 0), ("static", 0), ("interleaving", 0), ("batching", 0), ("batching", 3)]
)
def test_a_gpu_is_recorded(technique: str, drafts: int, monkeypatch: pytest.MonkeyPatch):
    """Batches keep the device longer than the host; else a tiny model's step may be over before it is asked for."""
    make_batches_late(monkeypatch)
    found = tracing.record(technique, size="tiny", drafts=drafts)
    assert len(tracing.as_text(found)) < 60_000
    arms = found["arms"]
    for arm in arms.values():
        assert arm["recorded_steps"] == 24
        assert len(arm["steps_us"]) == 3
        assert len(arm["rows"]) >= 2
        assert "call" in arm["rows"][0]["blocks"]
        assert all(row["blocks"] for row in arm["rows"][1:])
    assert arms["synchronous"]["critical_waits"] >= 1
    assert arms["asynchronous"]["critical_waits"] < arms["synchronous"]["critical_waits"]
