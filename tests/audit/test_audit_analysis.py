"""What an audit makes of recordings whose every nanosecond is known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import audit_reports
import pytest
import traces
from traces import MAIN, OTHER, Recording

from vllm_async_spec.audit.analysis import Findings, analyse
from vllm_async_spec.audit.device_time import LAUNCH_GAP_NS
from vllm_async_spec.audit.device_trace import cupti_thread
from vllm_async_spec.audit.headline import headline, sentence
from vllm_async_spec.audit.recorded import Recorded
from vllm_async_spec.audit.report import Cause, Phase, Place, WaitKind

BACKEND = "vllm/v1/backend.py"
D2H_PAGEABLE = "DtoH (Device -> Pageable)"
D2H_PINNED = "DtoH (Device -> Pinned)"
H2D_PAGEABLE = "HtoD (Pageable -> Device)"
H2D_PINNED = "HtoD (Pinned -> Device)"


@pytest.fixture
def recording() -> Recording:
    recording = Recording()
    recording.kernel(0, 400)
    return recording


def analysed(recording: Recording, folder: Path, steps: Sequence[float] = (0, 1000, 2000)) -> Findings:
    recorded = recording.load(folder, [*steps])
    return analyse(recorded, recorded)


def causes(recording: Recording, folder: Path) -> list[Cause]:
    return list(analysed(recording, folder).causes)


def only(recording: Recording, folder: Path) -> Cause:
    found = causes(recording, folder)
    assert len(found) == 1, found
    return found[0]


def test_threads_are_recognised_as_cupti_names_them():
    # Both pairs were read off a recording of PyTorch 2.11.
    assert cupti_thread(140_593_167_476_416) == 1_708_009_152
    assert cupti_thread(140_607_295_127_872) == 1_344_208_576


def test_a_read_is_the_copy_and_the_wait_before_its_warning(recording, tmp_path):
    recording.copy(100, 4, D2H_PINNED, 4, at=400)
    recording.runtime("cudaStreamSynchronize", 104, 300)
    recording.call("warning", 410, 410, line=31)
    cause = only(recording, tmp_path)
    assert (cause.kind, cause.place, str(cause.site)) == (WaitKind.READ, Place.CRITICAL, f"{BACKEND}:31 in build")
    assert cause.per_step == 0.5
    assert cause.longest_ms == pytest.approx(0.304)
    assert cause.ms_per_step == pytest.approx(0.152)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        (D2H_PAGEABLE, 256, WaitKind.COPY_TO_HOST),
        (D2H_PINNED, 256, WaitKind.COPY_TO_HOST),
        (H2D_PAGEABLE, 256, WaitKind.COPY_TO_DEVICE),
        (H2D_PINNED, 4, WaitKind.COPY_TO_DEVICE),
    ],
)
def test_a_blocking_copy_is_told_by_its_direction(recording, tmp_path, kind, size, expected):
    recording.copy(100, 4, kind, size, at=400)
    recording.runtime("cudaStreamSynchronize", 104, 300)
    recording.call("copy", 99, 405, line=32)
    recording.call("warning", 404.5, 404.5, line=32)  # the same wait
    assert (only(recording, tmp_path).kind, only(recording, tmp_path).place) == (expected, Place.CRITICAL)


@pytest.mark.parametrize(
    ("kind", "us", "place"),
    [(D2H_PAGEABLE, 320, Place.CRITICAL), (H2D_PAGEABLE, 5, Place.OVERLAPPED)],
    ids=["blocked", "staged by the driver"],
)
def test_a_pageable_copy_without_blocking_is_found(recording, tmp_path, kind, us, place):
    recording.copy(100, us, kind, 4 << 20, at=399)
    recording.call("copy", 99, 101 + us, line=33)
    assert (only(recording, tmp_path).kind, only(recording, tmp_path).place) == (WaitKind.PAGEABLE, place)


@pytest.mark.parametrize("kind", [D2H_PINNED, H2D_PINNED])
def test_a_copy_of_pinned_memory_that_nobody_waits_for_is_no_wait(recording, tmp_path, kind):
    recording.copy(100, 4, kind, 256, at=400)
    recording.call("copy", 99, 105, line=34)
    recording.copy(110, 4, kind, 256, at=402)  # nor one that no Python call was seen for
    assert causes(recording, tmp_path) == []


@pytest.mark.parametrize(
    ("start", "launched", "place"),
    [(401, 120, Place.OVERLAPPED), (500, 420, Place.CRITICAL)],
    ids=["work is left", "work is launched after the wait"],
)
def test_a_wait_is_overlapped_by_work_that_is_left_on_the_device(recording, tmp_path, start, launched, place):
    recording.kernel(start, 300, launched=launched)
    recording.runtime("cudaEventSynchronize", 150, 255)
    recording.call("event", 149, 406, line=35)
    cause = only(recording, tmp_path)
    assert (cause.kind, cause.place) == (WaitKind.EVENT, place)


def test_an_event_that_has_happened_holds_nothing_up(recording, tmp_path):
    recording.runtime("cudaEventSynchronize", 800, 3)
    recording.call("event", 799, 804, line=35)
    assert only(recording, tmp_path).place is Place.OVERLAPPED


def test_another_threads_wait_is_hidden_and_is_not_mixed_with_the_launching_threads(recording, tmp_path):
    recording.runtime("cudaEventSynchronize", 150, 255, thread=OTHER)
    recording.call("event", 149, 406, line=36, thread=OTHER)
    recording.call("event", 148, 407, line=37)  # of the main thread, around nothing of its own
    cause = only(recording, tmp_path)
    assert (cause.place, cause.thread, cause.site.line) == (Place.HIDDEN, "WorkerAsyncOutputCopy", 36)


def test_a_librarys_own_wait_is_given_to_the_function_around_it_and_noted(recording, tmp_path):
    recording.span("metadata building", "Builder.build", 90, 500)
    recording.runtime("cudaStreamSynchronize", 104, 300)
    found = analysed(recording, tmp_path)
    assert [(c.kind, c.phase, c.site.function) for c in found.causes] == [
        (WaitKind.STREAM, Phase.METADATA, "Builder.build")
    ]
    assert any(note.startswith("CUPTI timed 0.50 waits a step") for note in found.notes)


def test_who_reads_a_property_that_copies_is_who_asked(recording, tmp_path):
    for step in (0, 1000):
        recording.copy(step + 100, 4, D2H_PAGEABLE, 256, at=step + 400)
        recording.runtime("cudaStreamSynchronize", step + 104, 300)
        recording.call("warning", step + 405, step + 405, line=31)
        deprecated = ["/x/site-packages/typing_extensions.py", 3140, "deprecated.__call__.<locals>.wrapper"]
        recording.calls[-1]["stack"][1:1] = [[traces.HERE, 510, "CommonAttentionMetadata.seq_lens_cpu"], deprecated]
    recording.calls[-1]["stack"][3][1] = 32  # the second time it is read by the next line
    assert [str(cause.site) for cause in causes(recording, tmp_path)] == [
        f"{BACKEND}:31 in build",
        f"{BACKEND}:32 in build",
    ]


@pytest.mark.parametrize("name", ["cudaDeviceSynchronize", "cudaFree"])
def test_waits_for_the_whole_device(recording, tmp_path, name):
    recording.runtime(name, 104, 300)
    recording.call("device", 103, 405, line=38)
    assert only(recording, tmp_path).kind is WaitKind.DEVICE


def test_the_time_until_python_goes_on_is_noted_and_is_no_wait(recording, tmp_path):
    recording.runtime("cudaEventSynchronize", 150, 255)
    recording.call("event", 149, 905, line=35)
    found = analysed(recording, tmp_path)
    assert found.causes[0].longest_ms == pytest.approx(0.255)
    assert any("another 0.25 ms a step" in note for note in found.notes)


def test_shares_of_the_devices_time_and_what_the_host_did_in_a_gap(tmp_path):
    recording = Recording()
    recording.kernel(0, 400, launched=-10)
    recording.kernel(402, 100, launched=-9)  # a gap of 2 us: already launched
    recording.kernel(602, 398, launched=590)  # a gap of 100 us: the host
    recording.kernel(1004, 996, launched=-8)  # a gap of 4 us: already launched, so a dependency
    recording.span("scheduling", "Scheduler.schedule", 480, 595)
    gpu = analysed(recording, tmp_path).gpu
    assert gpu.busy + gpu.launch_gaps + gpu.host_idle == pytest.approx(1)
    assert gpu.launch_gaps == pytest.approx(2 / 2000)
    assert gpu.host_idle == pytest.approx(104 / 2000)
    assert gpu.kernels_per_step == 2
    assert gpu.host_gaps_per_step == 1
    assert [(gap.start_us, gap.us) for gap in gpu.gaps] == [(502, 100), (1000, 4)]
    assert gpu.gaps[0].host == "scheduling (schedule) 100%"
    assert "a dependency" in gpu.gaps[1].host


@pytest.mark.parametrize(("us", "idle"), [(LAUNCH_GAP_NS / 1000 - 0.5, 0), (LAUNCH_GAP_NS / 1000, 1)])
def test_three_microseconds_are_the_line_between_launch_gaps_and_the_hosts(tmp_path, us, idle):
    recording = Recording()
    recording.kernel(0, 500)
    recording.kernel(500 + us, 1500 - us)
    gpu = analysed(recording, tmp_path).gpu
    assert (gpu.host_idle > 0, gpu.launch_gaps > 0) == (bool(idle), not idle)


def test_streams_that_overlap_leave_no_gap_and_are_not_counted_twice(tmp_path):
    recording = Recording()
    recording.kernel(0, 1200)
    recording.kernel(100, 300, stream=13)
    recording.kernel(1100, 900, stream=13)
    assert analysed(recording, tmp_path).gpu.busy == pytest.approx(1)


def test_a_phase_is_its_own_time_without_what_is_inside_it(recording, tmp_path):
    recording.span("other", "Runner.execute_model", 0, 900)
    recording.span("input preparation", "Runner._prepare_inputs", 100, 300)
    recording.span("metadata building", "Runner._build", 400, 800)
    recording.span("metadata building", "Builder.build", 500, 700)
    recording.span("output", "Output.get_output", 0, 500, thread=OTHER)
    recording.runtime("cudaEventSynchronize", 120, 100)
    recording.call("event", 119, 221, line=35)
    found = analysed(recording, tmp_path)
    phases = {(p.thread, p.phase): (p.ms_per_step, p.waiting_ms_per_step) for p in found.phases}
    assert phases == {
        ("worker", Phase.INPUTS): (pytest.approx(0.1), pytest.approx(0.05)),
        ("worker", Phase.METADATA): (pytest.approx(0.2), 0),
        ("worker", Phase.OTHER): (pytest.approx(0.15), 0),
        ("WorkerAsyncOutputCopy", Phase.OUTPUT): (pytest.approx(0.25), 0),
    }


def test_the_longest_step_of_a_phase_is_told_from_its_mean(recording, tmp_path):
    """Steps are one millisecond each; what goes on into the next step counts there."""
    recording.span("input preparation", "Runner._prepare_inputs", 100, 200)
    recording.span("input preparation", "Runner._prepare_inputs", 700, 1050)
    recording.span("output", "Output.get_output", 900, 1900, thread=OTHER)
    found = analysed(recording, tmp_path)
    assert [(p.phase, p.ms_per_step, p.longest_step_ms) for p in found.phases] == [
        (Phase.INPUTS, pytest.approx(0.225), pytest.approx(0.4)),
        (Phase.OUTPUT, pytest.approx(0.5), pytest.approx(0.9)),
    ]


def test_what_is_outside_the_counted_steps_is_left_out(recording, tmp_path):
    recording.runtime("cudaEventSynchronize", -80, 50)
    recording.call("event", -81, -29, line=35)
    recording.runtime("cudaEventSynchronize", 2100, 50)
    recording.call("event", 2099, 2151, line=35)
    recording.span("scheduling", "Scheduler.schedule", -50, 50)
    found = analysed(recording, tmp_path)
    assert found.causes == ()
    assert [p.ms_per_step for p in found.phases] == [pytest.approx(0.025)]


def test_too_few_steps_are_refused_in_one_sentence(recording, tmp_path):
    with pytest.raises(ValueError, match=r"only 2 steps were recorded, of which the first 2 are left out; give"):
        recording.load(tmp_path, [0])


def test_the_timeline_shows_steps_of_the_middle_with_waits_and_gaps(tmp_path):
    recording = Recording()
    for step in range(8):
        recording.kernel(1000 * step, 600)
        recording.kernel(1000 * step + 601, 200)
        recording.span("scheduling", "Scheduler.schedule", 1000 * step + 10, 1000 * step + 60)
        recording.copy(1000 * step + 100, 4, D2H_PINNED, 4, at=1000 * step + 801)
        recording.runtime("cudaStreamSynchronize", 1000 * step + 104, 700)
        recording.call("warning", 1000 * step + 806, 1000 * step + 806, line=31)
    timeline = analysed(recording, tmp_path, range(0, 9000, 1000)).timeline
    assert timeline.us == 4000
    assert timeline.steps_us == (0, 1000, 2000, 3000)
    worker, stream = timeline.lanes
    assert (worker.name, stream.name) == ("worker", "GPU stream 7")
    waits = [item for item in worker.items if item.kind == "wait"]
    assert [(w.start_us, w.critical, w.where) for w in waits[:2]] == [
        (100, True, f"{BACKEND}:31 in build"),
        (1100, True, f"{BACKEND}:31 in build"),
    ]
    assert [(i.kind, i.start_us, i.us) for i in stream.items[:2]] == [("kernels", 0, 802), ("gap", 802, 198)]
    assert stream.items[0].label == "3 kernels"


def test_a_block_of_the_timeline_keeps_the_beginning_of_a_long_kernel_name(tmp_path):
    recording = Recording()
    for step in range(8):
        recording.kernel(1000 * step, 600, name="void at::native::reduce<" + "float, " * 200 + ">()")
    lane = analysed(recording, tmp_path, range(0, 9000, 1000)).timeline.lanes[-1]
    (label,) = {item.label for item in lane.items if item.kind == "kernels"}
    assert label.startswith("void at::native::reduce<float, ")
    assert label.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert len(label) == 60


@pytest.fixture
def facts():
    return audit_reports.waiting().engine


def test_the_sentence_says_where_the_host_waits_most_and_what_to_change(recording, tmp_path, facts):
    recording.copy(100, 4, D2H_PAGEABLE, 256, at=400)
    recording.runtime("cudaStreamSynchronize", 104, 300)
    recording.call("copy", 99, 405, line=32)
    found = analysed(recording, tmp_path)
    assert headline(facts, found) == "The host waits on the critical path"
    assert sentence(facts, found).startswith(
        f"Most waits are at {BACKEND}:32 in build; to change: build from device seq_lens"
    )
    off = replace(facts, async_scheduling=False)
    assert headline(off, found) == "Asynchronous scheduling is off; the host also waits for the GPU"
    assert sentence(off, found) == (
        f"Most waits are at {BACKEND}:32 in build; turn asynchronous scheduling on: `vllm-async-spec status` shows why "
        "it is off."
    )


def test_the_sentence_names_host_work_that_is_longer_than_the_waits(recording, tmp_path, facts):
    recording.runtime("cudaStreamSynchronize", 380, 50)
    recording.call("warning", 431, 431, line=32)
    recording.span("launch", "Runner._model_forward", 500, 1900)
    assert sentence(facts, analysed(recording, tmp_path)).endswith(
        "; beside the waits, launch takes 0.7 ms of the host a step, as it does where the forward runs without a CUDA "
        "graph."
    )


def test_of_a_clean_engine_is_said_that_there_is_nothing_to_win(tmp_path, facts):
    recording = Recording()
    recording.kernel(0, 1995)
    found = analysed(recording, tmp_path)
    assert headline(facts, found) == "Nothing waits on the critical path"
    assert sentence(facts, found) == "There is nothing to win by removing waits."


@pytest.mark.parametrize("scheduling", [True, False])
@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("idle", [0.5, 0.001, None])
def test_a_headline_has_at_most_twelve_words_and_the_sentence_no_more_of_them(
    facts, scheduling, simulated, waits, idle
):
    report = audit_reports.waiting()
    gpu = None if idle is None else replace(report.gpu, host_idle=idle)
    causes = report.causes if waits else ()
    found = Findings(report.steps, simulated, causes, report.phases, gpu, None, ())
    engine = replace(facts, async_scheduling=scheduling)
    said, more = headline(engine, found), sentence(engine, found)
    assert 0 < len(said.split()) <= 12
    assert "." not in said
    assert more.endswith(".")
    assert said.lower() not in more.lower()


def test_recordings_of_another_process_join_on_the_clock(recording, tmp_path):
    core = Recording()
    core.span("scheduling", "Scheduler.schedule", 10, 110, thread=MAIN)  # the same number, another thread
    core.load(tmp_path, [0, 1000, 2000], "core")
    recording.load(tmp_path, [0, 1000, 2000])
    files = {"recording": str(tmp_path / "recording.json"), "trace": str(tmp_path / "recording.trace.json")}
    joined = traces.load(files, {"recording": str(tmp_path / "core.json")})
    assert isinstance(joined, Recorded)
    phases = analyse(joined, joined).phases
    assert [(p.thread, p.phase, p.ms_per_step) for p in phases] == [
        ("engine core", Phase.SCHEDULING, pytest.approx(0.05))
    ]
