import threading
import warnings

import pytest
import torch

from vllm_async_spec.audit.cuda_waits import _WARNING, AuditedEvent, CudaWaits
from vllm_async_spec.audit.stack import plain, readable

HERE = "audit/test_cuda_waits.py"


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """PyTorch's sync debug mode, which a build without CUDA does not have."""
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return modes


def site(call) -> tuple[str, int]:
    frame = readable(plain(call.stack))[0]
    return frame.file, frame.line


def line() -> int:
    import sys

    return sys._getframe(1).f_lineno


def test_a_synchronising_operation_is_noted_at_its_line_and_other_warnings_go_their_way(mode):
    waits = CudaWaits()
    with warnings.catch_warnings(record=True) as others:
        waits.start()
        for _ in range(2):  # each time, not once a line
            warnings.warn(f"{_WARNING} (Triggered internally)", UserWarning, stacklevel=1)
            expected = line() - 1
        warnings.warn("another matter", UserWarning, stacklevel=1)
        waits.stop()
    assert [str(other.message) for other in others] == ["another matter"]
    assert [(call.what, *site(call)) for call in waits.calls] == [("warning", HERE, expected)] * 2
    assert mode == [0, "warn", 0]


def test_what_sync_debug_mode_does_not_see_is_noted_on_every_thread(mode):
    waits = CudaWaits()
    event = AuditedEvent("cpu")
    waits.start()
    torch.cuda.synchronize()
    AuditedEvent.listener(lambda: None)
    thread = threading.Thread(target=torch.cuda.synchronize)
    thread.start()
    thread.join()
    waits.stop()
    torch.cuda.synchronize()
    assert isinstance(event, torch.Event) or not isinstance(torch.Event, type)
    assert [call.what for call in waits.calls] == ["device", "event", "device"]
    assert waits.calls[0].thread == threading.get_ident() != waits.calls[2].thread
    assert all(call.start <= call.end for call in waits.calls)


def test_a_wait_for_an_event_of_torch_cuda_is_noted(mode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)  # without CUDA there is none to make
    waits = CudaWaits()
    waits.start()
    torch.cuda.Event.synchronize(None)
    expected = line() - 1
    waits.stop()
    torch.cuda.Event.synchronize(None)
    assert [(call.what, *site(call)) for call in waits.calls] == [("event", HERE, expected)]


def changeable() -> tuple[object, ...]:
    functions = torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.Tensor.to, torch.Tensor.copy_
    return *functions, warnings.showwarning, list(warnings.filters), set(vars(torch.Tensor))


def test_nothing_is_left_behind(mode):
    before = changeable()
    waits = CudaWaits()
    waits.start()
    assert torch.cuda.synchronize is not before[0]
    waits.stop()
    assert changeable() == before


def test_copies_within_one_device_are_not_noted(mode):
    waits = CudaWaits()
    waits.start()
    tensor = torch.arange(4)
    tensor.to(torch.int64)
    tensor.copy_(torch.zeros(4, dtype=torch.int64), non_blocking=True)
    tensor.cpu()
    tensor.to("meta")  # as far from a GPU as this one
    waits.stop()
    assert waits.calls == []


@pytest.mark.parametrize("asked", [{}, {"enable_timing": False}])
def test_events_without_times_are_refused_in_pytorchs_words(asked: dict[str, bool]):
    """Those of `torch.Event`: a subclass is refused as no event at all."""
    with pytest.raises(ValueError, match="created with argument 'enable_timing=True'"):
        AuditedEvent(enable_timing=True).elapsed_time(torch.Event(**asked))


def test_two_audited_events_are_taken_for_events():
    """KV offloading measures its copies so; a CPU records no event."""
    with pytest.raises(ValueError, match="must be recorded"):
        AuditedEvent(enable_timing=True).elapsed_time(AuditedEvent(enable_timing=True))


@pytest.mark.gpu
def test_audited_events_measure_time():
    before, after = AuditedEvent(enable_timing=True), AuditedEvent(enable_timing=True)
    before.record()
    torch.cuda._sleep(10_000_000)
    after.record(torch.cuda.current_stream())
    after.synchronize()
    assert 1.0 < before.elapsed_time(after) < 1000.0


def test_an_audited_event_is_recorded_by_name_too():
    with pytest.raises(RuntimeError, match="doesn't support events"):  # of PyTorch's own; it knows the argument
        AuditedEvent("cpu").record(stream=None)
