"""One load put to a class of runners, and what is wrong then; and one request that reaches the longest sequence."""

import os
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from simulation.engine import Engine
from simulation.happened import happened
from simulation.judge import differences, mistakes
from simulation.model import greedy
from simulation.schedule import Schedule, random_schedule, run
from simulation.shape import LONGEST, Shape
from simulation.wishes import Wishes

LOADS = int(os.environ.get("SIMULATION_LOADS", "3"))
WISHFUL = (0, 4)
"""Seeds of the loads with wishes; they hold every reason to wait."""
EARLY = pytest.mark.parametrize("drained", [False, True], ids=["two batches in flight", "outputs that come early"])

_references: dict[Schedule, Engine] = {}


def reference(stock: Any, schedule: Schedule) -> Engine:
    """Stock's run on a device that is never late; made once."""
    if schedule not in _references:
        _references[schedule] = run(stock, schedule, late=False)
    return _references[schedule]


def been_through(stock: Any) -> set[str]:
    """What five loads go through; runners under test are given the first of them, and others."""
    return set[str]().union(*(happened(reference(stock, random_schedule(seed))) for seed in (0, 1, 5, 10, 39)))


def wrong(
    runner_class: Any,
    stock: Any,
    schedule: Schedule,
    *,
    late: bool = True,
    waited: bool = True,
    also: Callable[[Engine, Schedule], list[str]] = lambda engine, schedule: [],
) -> list[str]:
    """The first things that are wrong with a class, errors included; `waited` is of `mistakes`."""
    try:
        engine = run(runner_class, schedule, late=late)
        found = list(islice(mistakes(engine, schedule, waited=waited), 3)) or also(engine, schedule)
        if not found and (schedule.stock_is_right or not waited) and schedule.shape.long_drafter:
            found = list(islice(differences(reference(stock, schedule), engine, schedule), 3))
    except Exception as error:
        # As on a GPU, a wrong index is an error somewhere later.
        return [f"{type(error).__name__}: {error}"]
    return found


def wrong_of_patch(
    runner_class: Any, schedule: Schedule, patch_class: type, *methods: str, compared: bool
) -> list[str]:
    """The first things that are wrong with a late run of a patched class, by itself and where it is `compared`.

    It is compared with vLLM's functions on a device that is not late. They run where each of the `methods` of the
    patch's class has nothing for them.
    """
    engine = run(runner_class, schedule, late=True)
    found = list(islice(mistakes(engine, schedule, waited=False), 3))
    if not found and compared:
        with pytest.MonkeyPatch.context() as patch:
            for name in methods:
                patch.setattr(patch_class, name, lambda *_: None)
            without = run(runner_class, schedule, late=False)
        found = list(islice(differences(without, engine, schedule), 3))
    return found


def longest_beside(runner_class: Any, wishes: Wishes) -> tuple[list[int], list[int]]:
    """The tokens of a request that reaches the model's length, beside a later one with wishes; and the right tokens."""
    engine, prompt = Engine(runner_class, Shape(tokens=48), random.Random(0)), list(range(LONGEST - 16))
    engine.add("long", prompt, 60, -1)
    while len(engine.steps) < 9:
        engine.step()
    engine.add("wishful", [1, 2, 3], 30, -1, wishes)
    while engine.busy:
        engine.step()
    assert engine.outputs["wishful"] == greedy([1, 2, 3], 30, -1, LONGEST, wishes)
    return engine.outputs["long"], greedy(prompt, 60, -1, LONGEST)
