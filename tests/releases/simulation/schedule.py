"""Random loads, from a seed, that two engines can be given alike."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from simulation.engine import LONGEST, Engine, Shape
from simulation.model import VOCABULARY


@dataclass(frozen=True, slots=True)
class Events:
    """What happens before one step is scheduled.

    Attributes:
        arrivals: Requests that arrive.
        aborts: Requests that are aborted.
        drafts: How many drafts the scheduler plans with from now on.
        budget: How many tokens it may schedule from now on.
        reset: Whether the prefix cache is reset, and all that runs is preempted.
        drained: Whether all output is processed before the next step is scheduled.
    """

    arrivals: tuple[str, ...]
    aborts: tuple[str, ...]
    drafts: int
    budget: int
    reset: bool
    drained: bool


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A load.

    Attributes:
        seed: Where it comes from.
        shape: The engine's size.
        requests: By name: prompt, number of tokens, stop token.
        events: By step; after the last, nothing more happens.
        careful: Whether the prefix cache is only reset where the scheduler can.
    """

    seed: int
    shape: Shape
    requests: Mapping[str, tuple[list[int], int, int]]
    events: tuple[Events, ...]
    careful: bool = True


@functools.cache
def random_schedule(seed: int, *, steps: int = 30, drained: bool = False) -> Schedule:
    """Arrivals, aborts, few blocks and tokens, dropped drafts, resets; and, if asked, outputs that come early."""
    choose = random.Random(seed)
    shape = Shape(
        drafts=choose.choice([1, 3, 3, 5]),
        rows=choose.choice([2, 4, 6]),
        tokens=choose.choice([16, 32, 48]),
        blocks=choose.choice([28, 40, 100]),
        prefix_caching=choose.random() < 0.5,
        long_drafter=choose.random() < 0.7,
        axes=choose.random() < 0.3,
    )
    requests: dict[str, tuple[list[int], int, int]] = {}
    events = []
    shared = [choose.randrange(VOCABULARY) for _ in range(LONGEST)]
    changing = choose.random() < 0.6
    chance_of_arrival = choose.choice([0.2, 0.5, 1.0])
    drafts, budget = shape.drafts, shape.tokens
    for _ in range(steps):
        arrivals = []
        while choose.random() < chance_of_arrival and len(arrivals) < 3 and len(requests) < 12:
            name = f"r{len(requests)}"
            length = choose.choice([1, 2, choose.randrange(3, 20), choose.randrange(20, LONGEST - 8)])
            own = choose.choice([0, length]) if shape.prefix_caching else length
            prompt = shared[: length - own] + [choose.randrange(VOCABULARY) for _ in range(own)]
            requests[name] = (prompt, choose.choice([1, 2, 6, 20, 60]), choose.randrange(VOCABULARY))
            arrivals.append(name)
        if changing and choose.random() < 0.3:
            drafts = choose.choice([shape.drafts, shape.drafts, choose.randrange(shape.drafts + 1), 0])
        if changing and choose.random() < 0.2:
            budget = choose.choice([shape.tokens, choose.randrange(shape.drafts + 1, shape.tokens + 1)])
        gone = [name for name in requests if choose.random() < 0.01]
        reset = choose.random() < 0.08
        early = drained and choose.random() < 0.3
        events.append(Events(tuple(arrivals), tuple(gone), drafts, budget, reset, early))
    return Schedule(seed, shape, requests, tuple(events))


def play(schedule: Schedule, engine: Engine, limit: int = 600) -> None:
    """Give a load to an engine, and run it until it is idle.

    Raises:
        RuntimeError: It is not after `limit` steps.
    """
    for happens in schedule.events:
        engine.plan(drafts=happens.drafts, tokens=happens.budget)
        for name in happens.arrivals:
            engine.add(name, *schedule.requests[name])
        for name in happens.aborts:
            engine.abort(name)
        if happens.reset:
            engine.reset_prefix_cache(carefully=schedule.careful)
        engine.step(drained=happens.drained)
    engine.plan(drafts=schedule.shape.drafts, tokens=schedule.shape.tokens)
    while engine.busy:
        limit -= 1
        if not limit:
            raise RuntimeError(f"schedule {schedule.seed} does not come to an end")
        engine.step()
    engine.gpu.finish()
