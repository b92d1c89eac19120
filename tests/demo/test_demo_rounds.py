"""Which rounds of the demo count, with engines in plain Python whose speeds are chosen."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from vllm_async_spec.demo import compare as demo
from vllm_async_spec.demo.compare import WAYS, Comparison, Way
from vllm_async_spec.demo.rounds import Rounds, enough
from vllm_async_spec.demo.train import DemoModels

COMPILES = [320.0, 4000.0]


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ([*COMPILES[:1], 5000, 5000, 5000], None),
        ([*COMPILES, 5000, 5100], None),
        ([*COMPILES, 5000, 5100, 5517], Rounds(run=5, counted=3, steady=True)),
        ([*COMPILES, 320, 5100, 5517], None),
        ([*COMPILES, 320, 5100, 5517, 5200], Rounds(run=6, counted=3, steady=True)),
        ([*COMPILES, *[5000, 320] * 5, 5000], None),
        ([*COMPILES, *[5000, 320] * 6], Rounds(run=14, counted=3, steady=False)),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_the_last_rounds_count_once_all_engines_are_steady(speeds: list[float], found: Rounds | None, place: int):
    engines = [speeds, [1000.0] * len(speeds)]
    assert enough(engines[::-1] if place else engines, 3, took_s=9.0) == found


def test_a_slow_machine_is_not_asked_for_more_rounds_than_needed():
    varying = [*COMPILES, 320, 5100, 5517]
    assert enough([varying], 3, took_s=59.0) is None
    assert enough([varying], 3, took_s=61.0) == Rounds(run=5, counted=3, steady=False)
    assert enough([varying[:4]], 3, took_s=61.0) is None


class Engine:
    def __init__(self, way: Way, seconds: Sequence[float], turns: list[str]) -> None:
        self._way = way
        self._seconds = [*seconds]
        self._turns = turns

    def wait_until_ready(self) -> None:
        """At once."""

    def ask(self, command: str) -> dict[str, Any]:
        if command == "describe":
            asked = self._way.async_scheduling
            return {"async_scheduling": self._way.plugin if asked is None else asked, "runner": "V1"}
        if command == "probe":
            return {"now": 0.0, "late": 1.0}
        self._turns.append(self._way.name)
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        drafts = 10 if self._way.speculative else 0
        return {"tokens": [[1] * 50, [2] * 50], "seconds": seconds, "drafts": drafts, "accepted": drafts}


def compared(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, Sequence[float]], **options: Any
) -> tuple[Comparison, list[str], Progress]:
    turns: list[str] = []

    @contextlib.contextmanager
    def start(way: Way, *_: object) -> Iterator[Engine]:
        yield Engine(way, seconds.get(way.name, [1.0]), turns)

    monkeypatch.setattr(demo, "_engine", start)
    monkeypatch.setattr(demo, "_device_and_vllm", lambda: ("CPU", "0.32.0"))
    progress = Progress(disable=True)
    nowhere = DemoModels(Path("target"), Path("draft"))
    return demo.compare(nowhere, log_dir=Path("logs"), progress=progress, **options), turns, progress


def test_warm_up_is_not_in_the_figures(monkeypatch: pytest.MonkeyPatch):
    found, turns, progress = compared(monkeypatch, {"synchronous": [9.0, 8.0, 1.0, 1.1, 1.0]}, rounds=3)
    assert (found.warm_up, found.rounds, found.steady) == (2, 3, True)
    result = found.results[1]
    assert (result.tokens_per_second, result.spread) == (100.0, (100 / 1.1, 100.0))
    assert result.deviation == pytest.approx(1 - 1 / 1.1)
    names = [way.name for way in WAYS]
    assert turns[:8] == [*names[::-1], *names], "the order of turns is reversed every other round"
    assert len(turns) == 5 * len(WAYS)
    assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
        ("Starting vLLM four times", 4, 4),
        ("Generating in rounds", 20, 20),
        ("Counting host reads", 4, 4),
    ]
    assert found.failures == ()


def test_rounds_go_on_until_a_disturbance_is_over(monkeypatch: pytest.MonkeyPatch):
    found, turns, progress = compared(monkeypatch, {"with the plugin": [1.0, 1.0, 1.0, 16.0, 1.0]}, rounds=3)
    assert (found.warm_up, found.rounds, found.steady) == (4, 3, True)
    assert all(result.deviation == 0 for result in found.results)
    assert len(turns) == 7 * len(WAYS)
    task = progress.tasks[1]
    assert (task.description, task.completed, task.total) == ("Generating until speeds are steady", 28, 28)


def test_a_machine_that_never_settles_is_told(monkeypatch: pytest.MonkeyPatch):
    found, _, _ = compared(monkeypatch, {"synchronous": [1.0, 5.0] * 9}, rounds=2)
    assert (found.warm_up, found.rounds, found.steady) == (8, 2, False)
    assert found.to_dict()["steady"] is False


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("2", "2")])
def test_an_engine_on_a_cpu_has_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
):
    environments: list[dict[str, str]] = []

    @contextlib.contextmanager
    def start(*_: object, env: dict[str, str], **__: object) -> Iterator[None]:
        environments.append(env)
        yield

    monkeypatch.setattr(demo.json_child, "start", start)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    demo._engine(WAYS[0], DemoModels(Path("target"), Path("draft")), 3, 128, Path("logs")).__enter__()
    assert environments[0]["OMP_NUM_THREADS"] == found
