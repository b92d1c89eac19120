"""Recording: what is hooked in, what is put back, and that a failure stays the audit's own."""

import contextlib
import gc
import json
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from vllm_async_spec import json_child
from vllm_async_spec.audit import spans as spans_module
from vllm_async_spec.audit.cpu_waits import AuditedCpuEvent, CpuWaits
from vllm_async_spec.audit.launch import _sending, audit_model
from vllm_async_spec.audit.loads import LoadError, Request, Work, check_load
from vllm_async_spec.audit.recording import DONE, How, Order, Recorder, UnderWay
from vllm_async_spec.audit.report import Phase
from vllm_async_spec.audit.spans import Watch
from vllm_async_spec.audit.stack import plain, readable


class Base:
    def inherited(self) -> str:
        return "inherited"


class Runner(Base):
    def step(self) -> str:
        return "stepped " + self.inherited()

    def fails(self) -> None:
        raise KeyError("its own")

    attribute = 3


def test_watched_functions_are_noted_nested_and_put_back():
    before = dict(vars(Runner)), dict(vars(Base))
    watch = Watch()
    assert watch.watch(Runner, "step", Phase.OTHER)
    assert watch.watch(Runner, "inherited", Phase.INPUTS)
    assert watch.watch(Runner, "step", Phase.OTHER)  # once is enough
    assert not watch.watch(Runner, "attribute", Phase.OTHER)
    assert not watch.watch(Runner, "absent", Phase.OTHER)
    assert not watch.watch(type(None), "propose", Phase.DRAFTING)
    assert Runner().step() == "stepped inherited"
    watch.stop()
    Runner().step()
    assert before == (dict(vars(Runner)), dict(vars(Base)))
    inner, outer = watch.spans
    assert (inner.name, inner.phase) == ("Base.inherited", Phase.INPUTS)
    assert (outer.name, outer.phase) == ("Runner.step", Phase.OTHER)
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert outer.thread == threading.get_ident()
    assert Path(outer.file).name == Path(__file__).name


def test_a_watched_function_that_raises_raises_and_is_noted():
    watch = Watch()
    watch.watch(Runner, "fails", Phase.OTHER)
    with pytest.raises(KeyError, match="its own"):
        Runner().fails()
    watch.stop()
    assert [span.name for span in watch.spans] == ["Runner.fails"]


def test_a_garbage_collection_is_time_of_its_own_and_not_of_the_function_around_it(request: pytest.FixtureRequest):
    gc.disable()  # Python would collect by itself too
    request.addfinalizer(gc.enable)
    watch, callbacks = Watch(), list(gc.callbacks)
    watch.watch(gc_owner := types.SimpleNamespace(collects=lambda: gc.collect()), "collects", Phase.INPUTS)
    watch.watch_collections()
    gc_owner.collects()
    watch.stop()
    gc.collect()  # after the recording
    assert gc.callbacks == callbacks
    around = next(span for span in watch.spans if span.phase is Phase.INPUTS)
    collected = [span for span in watch.spans if span.phase is Phase.COLLECTION and span.start >= around.start]
    assert [(span.thread, span.end <= around.end) for span in collected] == [(threading.get_ident(), True)]


def watch_runner(watch: Watch, cpu: CpuWaits | None) -> None:
    watch.watch(Runner, "step", Phase.OTHER, around=cpu.following if cpu else None)


def run(recorder: Recorder, steps: int) -> None:
    for _ in range(steps):
        recorder.on_step()
        Runner().step()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(watch_runner)


def test_a_recorder_leaves_steps_out_records_and_says_when_it_is_done(recorder, tmp_path):
    before = vars(Runner)["step"]
    run(recorder, 3)  # nobody asked
    recorder.arm(Order(How.FULL if not torch.cuda.is_available() else How.PLAIN, 2, 3, str(tmp_path)))
    run(recorder, 5)
    assert recorder.recorded == 2
    assert not (tmp_path / DONE).exists()
    run(recorder, 4)
    assert (tmp_path / DONE).exists()
    assert vars(Runner)["step"] is before
    saved = json.loads(Path(recorder.save("worker")["recording"]).read_text())
    assert len(saved["steps"]) == 4
    assert saved["steps"] == sorted(saved["steps"])
    assert saved["thread"] == threading.get_ident()
    assert recorder.order is None


def test_plain_steps_hook_nothing_in(recorder, tmp_path):
    before = vars(Runner)["step"]
    recorder.arm(Order(How.PLAIN, 0, 3, str(tmp_path)))
    run(recorder, 2)
    assert vars(Runner)["step"] is before
    assert AuditedCpuEvent.waits is None


def test_a_profile_is_written_without_an_object_of_python_for_each_event(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("vllm_async_spec.audit.recording.ProfilerActivity.CUDA", ProfilerActivity.CPU)
    recorder.arm(Order(How.DEVICE, 0, 3, str(tmp_path)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            recorder.on_step()
            torch.ones(2).add_(1)
    assert recorder.failure is None
    assert not [each for each in gc.get_objects() if type(each) is FunctionEvent]
    trace = json.loads(Path(recorder.save("worker")["trace"]).read_text())
    assert sum(event["name"] == "aten::add_" for event in trace["traceEvents"]) == 3


def test_a_second_audit_is_refused_until_the_first_has_been_saved_or_cancelled(recorder, tmp_path):
    order = Order(How.PLAIN, 0, 3, str(tmp_path))
    recorder.arm(order)
    run(recorder, 2)
    with pytest.raises(
        UnderWay, match=r"under way \(1 of 3 steps\); wait until it ends, or send the engine more requests"
    ):
        recorder.arm(order)
    recorder.cancel()
    recorder.arm(order)
    run(recorder, 4)
    recorder.save("worker")
    recorder.arm(order)


def test_a_recording_that_fails_leaves_the_engine_running_and_says_why(tmp_path):
    def breaks(watch: Watch, cpu: CpuWaits | None) -> None:
        watch.watch(Runner, "step", Phase.OTHER)
        raise AttributeError("no such runner")

    before = vars(Runner)["step"]
    recorder = Recorder(breaks)
    recorder.arm(Order(How.FULL, 0, 3, str(tmp_path)))
    run(recorder, 2)
    assert (tmp_path / DONE).exists()
    assert vars(Runner)["step"] is before
    assert AuditedCpuEvent.waits is None
    with pytest.raises(RuntimeError, match="recording failed: AttributeError: no such runner"):
        recorder.save("worker")
    recorder.arm(Order(How.PLAIN, 0, 3, str(tmp_path)))


@pytest.fixture
def waits():
    waits = CpuWaits()
    yield waits
    waits.stop()


def sites(waits: CpuWaits) -> list[tuple[str, bool]]:
    return [(read.what, read.late) for read in waits.found]


def test_a_copy_is_waited_for_at_its_event(waits):
    event = AuditedCpuEvent()
    with torch.inference_mode(), waits.following():
        computed = waits.forward(lambda: torch.arange(4))
        host = torch.empty(4, dtype=torch.int64)
        host.copy_(computed, non_blocking=True)
        other = computed.to("cpu", non_blocking=True)
        event.record()
        event.synchronize()
        host.tolist()
        other.numpy()
        computed.tolist()  # which is still the device's
    assert sites(waits) == [("event", False), ("tolist", False)]
    first = readable(plain(waits.found[0].stack))[0]
    assert first.source == "event.synchronize()"
    assert first.file == "audit/test_audit_recording.py"


def test_an_event_covers_only_what_was_copied_before_it_was_recorded(waits):
    event, later = AuditedCpuEvent(), torch.empty(4, dtype=torch.int64)
    with waits.following():
        computed = waits.forward(lambda: torch.arange(4))
        event.record()
        later.copy_(computed, non_blocking=True)
        event.synchronize()
        later.tolist()
    assert sites(waits) == [("event", False), ("tolist", False)]


def test_a_wait_for_the_step_before_is_late(waits):
    event = AuditedCpuEvent()
    with waits.following():
        waits.forward(lambda: torch.arange(4))
        event.record()
        waits.forward(lambda: torch.arange(4))
        event.synchronize()
    assert sites(waits) == [("event", True)]


def test_another_thread_is_followed_too(waits):
    found = []

    def fetch() -> None:
        with waits.following():
            found.append(computed.tolist())

    with waits.following():
        computed = waits.forward(lambda: torch.arange(4))
    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    assert [read.thread for read in waits.found] != [threading.get_ident()]
    assert sites(waits) == [("tolist", False)]


def test_two_threads_may_wait_for_the_same_copies(waits, monkeypatch):
    class Copy:
        def untyped_storage(self) -> types.SimpleNamespace:
            other = threading.Thread(target=waits.waited, args=(waits.recorded(),))
            other.start()
            other.join()
            return types.SimpleNamespace(_cdata=id(self))

    monkeypatch.setattr(waits, "step_of", lambda host: 0)
    for _ in range(3):
        waits.copying(Copy())
    waits.waited(waits.recorded())
    assert {read.what for read in waits.found} == {"event"}
    assert len(waits.found) == 4


def test_what_a_tensor_depends_on_may_be_waited_for_meanwhile(waits):
    class Vanishing(dict):
        def __contains__(self, key: object) -> bool:
            there = super().__contains__(key)
            self.clear()
            return there

    computed = waits.forward(lambda: torch.arange(4))
    waits._written = Vanishing(waits._written)
    assert waits.step_of([computed]) == 1


def test_an_event_may_be_heard_while_the_audit_ends(waits, monkeypatch):
    class Ending:
        def __init__(self) -> None:
            self.left = [waits]

        def __get__(self, *owner: object) -> CpuWaits | None:
            return self.left.pop() if self.left else None

    event = AuditedCpuEvent()
    for hear in (event.record, event.synchronize):
        monkeypatch.setattr(AuditedCpuEvent, "waits", Ending())
        hear()
    assert sites(waits) == [("event", False)]


def test_stand_ins_of_others_can_be_heard_and_are_put_back():
    class StandIn:
        def __init__(self) -> None:
            self.record = self.synchronize = lambda: None

    stand_in = StandIn()
    before = dict(vars(stand_in))
    waits = CpuWaits()
    waits.adopt(stand_in)
    stand_in.synchronize()  # never recorded
    stand_in.record()
    stand_in.synchronize()
    waits.stop()
    assert sites(waits) == [("event", False)]
    assert vars(stand_in) == before


def test_a_builder_is_given_the_devices_tensors_unless_they_are_the_hosts(waits):
    host = torch.arange(4)
    lengths = torch.arange(4)
    waits.on_device(lengths, unless=[host, None])
    waits.on_device(host[1:], unless=[host])
    with waits.following():
        lengths.tolist()
        host.tolist()
    assert sites(waits) == [("tolist", False)]


def work(load: str, **changes: int) -> Work:
    limits = {"batch": 4, "steps": 80, "tokens_a_step": 4, "vocabulary": 256, "longest": 768}
    return Work.make(load, **(limits | changes))


def test_loads_fit_the_model_and_are_the_same_each_time():
    decode = work("decode")
    assert [len(request.prompt) for request in decode.requests] == [64] * 4
    assert {request.max_tokens for request in decode.requests} == {320}
    mixed = work("mixed")
    assert len(mixed.requests) == 32
    assert mixed == work("mixed")
    assert all(len(r.prompt) + r.max_tokens <= 768 for r in (*decode.requests, *mixed.requests))
    assert all(0 <= token < 256 for request in mixed.requests for token in request.prompt)
    short = work("decode", longest=100)
    assert all(len(r.prompt) + r.max_tokens <= 100 for r in short.requests)


def test_a_file_of_requests(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 7}\r\n\n{"prompt_token_ids": [1, 2]}\n')
    asked = work(str(path))
    assert [(r.prompt, r.max_tokens) for r in asked.requests] == [("Hello", 7), ((1, 2), 128)]
    assert asked.name == "mine.jsonl"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--load is .*, which is not a file; give decode, mixed, or a file of JSON lines"),
        ("\n", "is empty; give a JSON object a line, with prompt or prompt_token_ids"),
        ('{"prompt": "a"}\n\n{"text": 1}', "line 3 of .* is '{\"text\": 1}'; it must be a JSON object with prompt"),
        ("hello", "line 1 of .* is 'hello'; it must be a JSON object"),
        ("[1]", "line 1 of .* it must be a JSON object"),
        *(
            (line, "line 1 of .* it must be a JSON object")
            for line in (
                '{"prompt": 5}',
                '{"prompt": null}',
                '{"prompt_token_ids": "hello"}',
                '{"prompt_token_ids": ["a"]}',
                '{"prompt_token_ids": []}',
                '{"prompt": "a", "max_tokens": 1e400}',
            )
        ),
        ("\udcff", "mine.jsonl can't be read .*; give"),
    ],
)
def test_a_bad_file_of_requests_is_refused_by_the_line(tmp_path, content, message):
    path = tmp_path / "mine.jsonl"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    for refuse in (work, check_load):
        with pytest.raises(LoadError, match=message):
            refuse(str(path))


def test_no_engine_starts_for_a_load_that_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(json_child, "start", lambda *_, **__: pytest.fail("an engine started"))
    arguments = {"batch": 1, "steps": 1, "plugin": True, "log": tmp_path / "log", "stage": print}
    with pytest.raises(LoadError, match="--load is 'fast', which is not a file"):
        audit_model(["--model", "x"], load="fast", **arguments)
    for load in ("decode", "mixed"):
        check_load(load)


def test_whatever_keeps_a_request_from_the_server_is_told():
    with _sending("http://x", {}, "m", Work("", (Request({1}, 1),), 1)) as sent:
        assert any(sent.refused or time.sleep(0.01) for _ in range(1000))


def test_a_stack_is_read_without_the_machinery():
    frames = readable(
        (
            ("/x/site-packages/torch/_tensor.py", 1, "item"),
            (contextlib.__file__, 2, "inner"),
            (spans_module.__file__, 3, "noting"),
            ("/x/site-packages/flashinfer/decode.py", 4, "plan"),
            ("/home/me/vllm/v1/worker.py", 5, "execute_model"),
            (__file__, 6, "test"),
        )
    )
    assert [frame.file for frame in frames] == [
        "flashinfer/decode.py",
        "vllm/v1/worker.py",
        "audit/test_audit_recording.py",
    ]
