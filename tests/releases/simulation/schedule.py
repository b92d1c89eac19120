"""Random loads, from a seed, that two engines can be given alike."""

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.engine import Engine
from simulation.model import greedy
from simulation.shape import LONGEST, Shape
from simulation.wishes import PLAIN, VOCABULARY, Wishes, penalties


@dataclass(frozen=True, slots=True)
class Events:
    """What happens before one step: `drafts` and `budget` (tokens) are planned with from now on."""

    arrivals: tuple[str, ...]
    aborts: tuple[str, ...]
    drafts: int
    budget: int
    reset: bool
    drained: bool


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A load: `requests` are prompt, number of tokens and stop token by name; `events` are by step.

    `careful`: the prefix cache is only reset where the scheduler can. `quiet`: outputs come early only after a step
    without drafts, where stock is right, too.
    """

    seed: int
    shape: Shape
    requests: Mapping[str, tuple[list[int], int, int]]
    events: tuple[Events, ...]
    careful: bool = True
    wishes: Mapping[str, Wishes] = field(default_factory=dict)
    quiet: bool = False

    @property
    def stock_is_right(self) -> bool:
        """Whether stock gets it right: where outputs come early, it subtracts rejected drafts a second time."""
        return self.quiet or not any(happens.drained for happens in self.events)


def random_schedule(seed: int, *, drained: bool = False) -> Schedule:
    return _random_schedule(seed, 30, 12, drained)


@functools.cache
def _random_schedule(seed: int, steps: int, most: int, drained: bool) -> Schedule:
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
        while choose.random() < chance_of_arrival and len(arrivals) < 3 and len(requests) < most:
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


def with_drains(schedule: Schedule) -> Schedule:
    """The same load with all outputs processed every few steps, where that does not harm stock."""
    events = list(schedule.events)
    for number in range(5, len(events), 5):
        events[number - 1] = replace(events[number - 1], drafts=0)
        events[number] = replace(events[number], drafts=schedule.shape.drafts, drained=True)
    return replace(schedule, events=tuple(events), quiet=True)


def wishful_schedule(seed: int, kinds: tuple[str, ...], *, drained: bool = False) -> Schedule:
    """A random load in which every fourth request has a wish of these kinds.

    They are `penalties`, `bad words`, `min_tokens`, `grammar` and `logprobs`.
    """
    return _wishful_schedule(seed, kinds, drained)


@functools.cache
def _wishful_schedule(seed: int, kinds: tuple[str, ...], drained: bool) -> Schedule:
    choose = random.Random(seed)
    schedule = _random_schedule(seed, 60, 24, drained)
    requests, wishes = dict(schedule.requests), dict[str, Wishes]()
    for number, (name, (prompt, count, stop)) in enumerate(schedule.requests.items()):
        if number % 4:
            continue
        count = min(max(count, 8), 12, LONGEST - len(prompt))
        kind = choose.choice(kinds)
        if kind == "penalties":
            wishes[name] = penalties(choose)
        elif kind == "grammar":
            wishes[name] = Wishes(grammar=choose.choice([2, 3]))
        elif kind == "logprobs":
            wishes[name] = Wishes(logprobs=True)
        elif kind == "bad words":
            wishes[name] = _bad_words(choose, prompt, count)
        else:
            stop, wishes[name] = _min_tokens(choose, prompt, count, schedule.shape.drafts)
        requests[name] = (prompt, count, stop)
    return replace(schedule, requests=requests, wishes=wishes)


def _bad_words(choose: random.Random, prompt: list[int], count: int) -> Wishes:
    wishes = Wishes()
    for _ in range(4):
        tokens = greedy(prompt, count, -1, LONGEST, wishes)
        at = choose.randrange(1, len(tokens))
        wishes = Wishes(bad_words=(*wishes.bad_words, (tokens[at - 1], tokens[at])))
    return wishes


def _min_tokens(choose: random.Random, prompt: list[int], count: int, drafts: int) -> tuple[int, Wishes]:
    """A stop token that would come soon, and how many tokens must come first.

    In a step that begins below `min_tokens` vLLM also keeps it from the token after the last draft, perhaps past them.
    """
    for _ in range(LONGEST):
        stop = choose.choice(greedy(prompt, count, -1, LONGEST)[:3])
        wishes = Wishes(min_tokens=choose.randrange(1, count + 1))
        tokens = greedy(prompt, count, stop, LONGEST, wishes, stops=False)
        if stop not in tokens[wishes.min_tokens : wishes.min_tokens + drafts + 1]:
            return stop, wishes
    raise RuntimeError("no stop token can wait")


def run(runner_class: Any, schedule: Schedule, *, late: bool, kind: type[Engine] = Engine) -> Engine:
    engine = kind(runner_class, schedule.shape, random.Random(schedule.seed) if late else None)
    play(schedule, engine)
    return engine


def play(schedule: Schedule, engine: Engine, limit: int = 600) -> None:
    for happens in schedule.events:
        engine.plan(drafts=happens.drafts, tokens=happens.budget)
        for name in happens.arrivals:
            engine.add(name, *schedule.requests[name], schedule.wishes.get(name, PLAIN))
        for name in happens.aborts:
            engine.abort(name)
        if happens.reset:
            engine.reset_prefix_cache(carefully=schedule.careful)
        engine.step(drained=happens.drained, quiet=schedule.quiet)
    engine.plan(drafts=schedule.shape.drafts, tokens=schedule.shape.tokens)
    while engine.busy:
        limit -= 1
        if not limit:
            raise RuntimeError(f"schedule {schedule.seed} does not come to an end")
        engine.step()
    engine.gpu.finish()
