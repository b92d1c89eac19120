import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_async_spec import reset_sync_report, streams, sync_policy, sync_report
from vllm_async_spec.streams import captured, captured_beside_others, counted_wait, refuse_waits

INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Late:
    def __init__(self, there: bool) -> None:
        self.there, self.waits = there, 0

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.there, self.waits = True, self.waits + 1


@pytest.mark.parametrize("there", [True, False])
def test_a_wait_is_counted_where_there_is_one(there: bool):
    reset_sync_report()
    arrival = Late(there)
    counted_wait(arrival, "flags", 24)
    counted_wait(arrival, "flags", 24)
    assert arrival.waits == (not there)
    assert [(site.what, site.count, site.bytes, site.site.file) for site in sync_report().sites] == [
        ("flags", 1, 24, __file__)
    ] * (not there)


def test_the_error_policy_lets_it_wait():
    """It refuses copies, for which waiting for an event is the remedy."""
    late = Late(there=False)
    with sync_policy("error"):
        counted_wait(late, "flags", 24)
    assert late.waits == 1


def test_a_wait_is_refused_and_one_in_another_thread_is_not(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's mode is of the process, and its warning comes in the thread that waits."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def read() -> str:
        assert modes[-1] == "warn"
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        return "read"

    def other_reads() -> None:
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(read).result() == "read"
        warnings.warn("another warning", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="another warning") as warned:
        refuse_waits(other_reads)
    assert len(warned) == 1
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        refuse_waits(read)
    assert modes == ["default", "warn", "default", "warn", "default"]


class Generator:
    """Stands for a device's generator of random numbers, whose state a capture has taken."""

    state = "capturing"

    def clone_state(self) -> str:
        return "free"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


class Capture:
    """Stands for `torch.cuda.graph`, which stays on its stream if the capture can't be ended."""

    current: Any = SimpleNamespace(device_index=0)
    ends = True

    def __init__(self, graph: Any, pool: Any) -> None:
        self.before = Capture.current

    def __enter__(self) -> None:
        Capture.current = "the capture's"

    def __exit__(self, *error: object) -> None:
        if not Capture.ends:
            raise RuntimeError(INVALIDATED)
        Capture.current = self.before


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("allocating", [True, False])
def test_a_capture_that_fails_leaves_nothing_in_capture_state(
    ends: bool, allocating: bool, monkeypatch: pytest.MonkeyPatch
):
    stream, generator, pools = Capture.current, Generator(), ["the pool"] * allocating

    def leave(device: int, pool: str) -> None:
        if pool not in pools:
            raise RuntimeError("not recording to this pool")
        pools.remove(pool)

    monkeypatch.setattr(Capture, "ends", ends)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Capture.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Capture, "current", stream))
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)
    with pytest.raises(RuntimeError if not ends else KeyError):
        captured(lambda: {}["a kernel"], "the pool")
    assert Capture.current is stream
    if not ends:
        assert generator.state == "free"
        assert pools == []


@pytest.mark.parametrize(("invalid", "captures"), [(0, 1), (2, 3)])
def test_a_capture_that_was_invalid_before_it_began_is_made_again(
    invalid: int, captures: int, monkeypatch: pytest.MonkeyPatch
):
    calls = capturing(monkeypatch, [None] * invalid)
    assert captured_beside_others(lambda: calls.append("prepared"), int, "a pool", stream="a stream") is int
    assert calls == ["prepared", ("a pool", {"stream": "a stream"})] * captures


@pytest.mark.parametrize("own", [KeyError("a kernel"), RuntimeError("not permitted when stream is capturing")])
def test_a_capture_that_fails_by_itself_is_not_made_again(own: Exception, monkeypatch: pytest.MonkeyPatch):
    calls = capturing(monkeypatch, [own])
    with pytest.raises(RuntimeError, match="previous error"):
        captured_beside_others(lambda: None, int, "a pool")
    assert len(calls) == 1


def test_a_capture_that_is_never_valid_is_an_error(monkeypatch: pytest.MonkeyPatch):
    calls = capturing(monkeypatch, [None] * 9)
    with pytest.raises(RuntimeError, match="previous error"):
        captured_beside_others(lambda: None, int, "a pool")
    assert len(calls) == 3


def capturing(monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None]) -> list[Any]:
    """Let captures fail as on a device: by the first error of `run`, if there is one, and then at the capture's end."""
    calls: list[Any] = []

    def capture(run: Callable[[], object], pool: str, **options: str) -> Callable[[], object]:
        calls.append((pool, options))
        if not errors:
            return run
        first = errors.pop(0) or RuntimeError(INVALIDATED)
        try:
            raise first
        finally:
            raise RuntimeError(INVALIDATED)

    monkeypatch.setattr(streams, "captured", capture)
    return calls


@pytest.mark.gpu
def test_a_captured_function_is_replayed_into_what_it_returned():
    given = torch.arange(4, device="cuda")
    torch.cuda.synchronize()
    replay = captured(lambda: given * 2, torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())
    given += 1
    assert replay().tolist() == [2, 4, 6, 8]
    stream = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            captured(lambda: given.sum().item(), torch.cuda.graph_pool_handle())
        assert torch.cuda.current_stream() == stream
        assert torch.rand(4, device="cuda").sum().item() > 0
    with pytest.raises(RuntimeError, match="synchronizing"):
        refuse_waits(lambda: given.sum().item())
