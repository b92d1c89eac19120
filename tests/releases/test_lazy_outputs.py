"""Outputs made by who asks for them, on a release's own executor."""

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from undone import applied, module_of


@pytest.fixture(scope="module")
def module(release: str) -> Any:
    return module_of(release, "lazy-outputs", "vllm.v1.executor.uniproc_executor")


def make_executor(module: Any, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool = True) -> Any:
    monkeypatch.setattr(module, "WorkerWrapperBase", mock.MagicMock())
    for name in ("current_platform", "envs"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, mock.MagicMock())
    executor = object.__new__(module.UniProcExecutor)
    executor.vllm_config = mock.MagicMock()
    executor.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
    monkeypatch.setattr(executor, "_distributed_args", lambda: ("nowhere", 0, 0))
    executor._init_executor()
    return executor


def sample(module: Any, executor: Any, make: Any, **options: Any) -> Any:
    output = type("Output", (module.AsyncModelRunnerOutput,), {"get_output": lambda self: make()})()
    executor.driver_worker = SimpleNamespace(sample_tokens=lambda grammar: output)
    return executor.collective_rpc("sample_tokens", args=(None,), non_block=True, **options)


@pytest.fixture
def patched(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    with applied("lazy-outputs"):
        yield make_executor(module, monkeypatch)


def test_stock_makes_outputs_in_a_thread(module, monkeypatch):
    executor = make_executor(module, monkeypatch)
    made = sample(module, executor, threading.get_ident, single_value=True).result(timeout=60)
    assert made != threading.get_ident()
    executor.async_output_thread.shutdown()


@pytest.mark.parametrize("single", [True, False])
def test_an_output_is_made_once_by_whoever_asks_first(module, patched, single):
    made: list[int] = []
    threads = threading.active_count()
    future = sample(module, patched, lambda: made.append(threading.get_ident()) or "tokens", single_value=single)
    assert (made, future.done()) == ([], False)
    assert [future.result(), future.result()] == ["tokens" if single else ["tokens"]] * 2
    assert made == [threading.get_ident()]
    assert future.done()
    assert threading.active_count() == threads


def test_what_fails_is_raised_where_it_is_asked_for(module, patched):
    def fail() -> None:
        raise ValueError("no such token")

    future = sample(module, patched, fail, single_value=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such token"):
            future.result()
    assert isinstance(sample(module, patched, fail, single_value=True).exception(), ValueError)


def test_an_output_that_is_not_late_is_there(patched):
    patched.driver_worker = SimpleNamespace(sample_tokens=lambda grammar: "tokens")
    future = patched.collective_rpc("sample_tokens", args=(None,), non_block=True, single_value=True)
    assert future.done()
    assert future.result() == "tokens"


def test_synchronous_scheduling_has_neither(module, patched, monkeypatch):
    executor = make_executor(module, monkeypatch, asynchronous=False)
    assert executor.async_output_thread is None
    assert sample(module, executor, lambda: "tokens", single_value=True).result() == "tokens"
