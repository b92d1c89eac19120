"""vLLM's scheduler and runner under random loads, on a device that runs late.

Two runs are judged: by what must hold of any run, and, where stock vLLM is right, by stock's run of the same load on a
device that is never late.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from simulation.engine import Engine
from simulation.judge import differences, mistakes
from simulation.planted import MISTAKES, optimistic
from simulation.schedule import Schedule, play, random_schedule


@pytest.fixture(scope="module")
def stock() -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def run(runner_class: Any, schedule: Schedule, *, late: bool = False) -> Engine:
    engine = Engine(runner_class, schedule.shape, random.Random(schedule.seed) if late else None)
    play(schedule, engine)
    return engine


def found(runner_class: Any, stock: Any, schedule: Schedule, *, late: bool = True) -> Iterator[str]:
    """What is wrong with a class, oldest first."""
    try:
        engine = run(runner_class, schedule, late=late)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    yield from mistakes(engine, schedule.requests)
    if not any(happens.drained for happens in schedule.events) and schedule.shape.long_drafter:
        yield from differences(run(stock, schedule), engine)


@pytest.mark.parametrize("seed", range(10))
def test_stock_is_right_on_a_device_that_is_never_late(stock: Any, seed: int) -> None:
    schedule = random_schedule(seed)
    assert list(islice(found(stock, stock, schedule, late=False), 3)) == []


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_an_optimistic_runner_that_corrects_the_device_is_right(stock: Any, seed: int, drained: bool) -> None:
    assert list(islice(found(optimistic(stock), stock, random_schedule(seed, drained=drained)), 3)) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_it_is_found(stock: Any, mistake: str) -> None:
    """Within a few loads; `subtraction` is right as long as no output comes early."""
    for seed in range(12):
        if any(True for _ in found(optimistic(stock, mistake), stock, random_schedule(seed, drained=seed % 2 == 1))):
            return
    pytest.fail(f"12 loads do not show that {MISTAKES[mistake]}")
