"""Callers of a `ContinuousBatcher` that misbehave, in one thread by one seed, and a model of what must come."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_models
import torch

from vllm_async_spec.generation import ContinuousBatcher
from vllm_async_spec.generation.batching import BatcherError, Request, batcher
from vllm_async_spec.generation.batching.runner import Launched
from vllm_async_spec.generation.batching.scheduler import Row

LENGTH = 48
STOP = 7
DRAFTS = 3


CHOOSE = random.Random(0)
PROMPTS = [
    tuple(CHOOSE.randrange(1, tiny_models.VOCABULARY) for _ in range(length)) for length in (1, 2, 3, 5, 8, 9, 14, 20)
]


def token_at(prompt: tuple[int, ...], position: int) -> int:
    """What the stubbed model says after so many tokens of a sequence; now and then the end."""
    return zlib.crc32(repr((prompt, position)).encode()) % 24


def whole(prompt: tuple[int, ...]) -> list[int]:
    tokens, _ = given_from(prompt, len(prompt), LENGTH - len(prompt))
    return tokens


def given_from(prompt: tuple[int, ...], first: int, count: int) -> tuple[list[int], bool]:
    """The tokens of a step that computes so many from a position on, up to an end, and whether that is there."""
    tokens = [token_at(prompt, first + index) for index in range(count)]
    return (tokens[: tokens.index(STOP) + 1], True) if STOP in tokens else (tokens, False)


class StubRunner:
    """A `Runner` that calls no model; its results arrive when somebody waits for them, or at random before."""

    def __init__(self, *_: Any, sizes: Any, **__: Any) -> None:
        self.batch: int = sizes.batch
        self.drafts: int = sizes.drafts
        self.rows: int = sizes.results
        self.chance = random.Random(0)
        self.computed: dict[int, int] = {}
        self.without_memory = False
        """Whether the next launch finds no memory."""

    def open(self) -> StubStep:
        return StubStep(self)


class StubStep:
    def __init__(self, runner: StubRunner) -> None:
        self._runner = runner
        self._results = torch.zeros(runner.rows, 3 + runner.drafts, dtype=torch.int64)

    def fill(self, decodes: Sequence[Row], prefills: Sequence[Row]) -> None:
        """Nothing is computed from inputs."""

    def decode(self, rows: Sequence[Row]) -> None:
        self._compute(rows, 0)

    def prefill(self, rows: Sequence[Row]) -> None:
        self._compute(rows, self._runner.batch)

    def close(self) -> Launched:
        return Launched(Late(self._runner.chance), self._results)

    def _compute(self, rows: Sequence[Row], place: int) -> None:
        runner = self._runner
        if runner.without_memory:
            runner.without_memory = False
            raise torch.OutOfMemoryError("tried to allocate")
        for index, row in enumerate(rows, place):
            prompt, first = row.job.request.prompt, row.stop
            if row.drafts:
                first = min(runner.computed[id(row.job)], row.job.last) + 1
            count = 1 + (runner.chance.randint(0, row.drafts) if row.drafts else 0)
            runner.computed[id(row.job)] = first + count - 1
            tokens, stops = given_from(prompt, first, count)
            self._results[index, : 2 + len(tokens)] = torch.tensor([int(stops), len(tokens), *tokens])


@dataclass
class Late:
    chance: random.Random

    def query(self) -> bool:
        return self.chance.random() < 0.5

    def synchronize(self) -> None:
        """It is there now."""


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "Runner", StubRunner)
        yield


class FaultyLoop(asyncio.SelectorEventLoop):
    """An event loop whose `call_soon_threadsafe` misbehaves: the one method of a caller's that a step calls."""

    def __init__(self, misbehave: Callable[[FaultyLoop], None]) -> None:
        super().__init__()
        self._misbehave = misbehave

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:
        self._misbehave(self)
        return super().call_soon_threadsafe(*args, **kwargs)

    def turn(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()


@dataclass
class Reader:
    kind: str
    loop: FaultyLoop
    enough: int
    given: list[int] = field(default_factory=list)
    task: Any = None

    def begin(self, request: Request) -> None:
        self.task = self.loop.create_task(self.read(request))
        # Many of them never end, or end with an error that nobody looks at.
        self.task._log_destroy_pending = False
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def read(self, request: Request) -> None:
        async for token in request:
            self.given.append(token)
            if len(self.given) == self.enough:
                if self.kind == "leaves":
                    break
                if self.kind == "raises":
                    raise ZeroDivisionError
                if self.kind == "stays":
                    await asyncio.Event().wait()  # and never asks for another


@dataclass
class Asked:
    request: Request
    reasons: set[str] = field(default_factory=lambda: {"eos", "length"})
    readers: list[Reader] = field(default_factory=list)
    unheard_from: int | None = None
    """How many tokens it had when a loop that waited for more was closed."""

    def check(self, expected: list[int]) -> None:
        request = self.request
        expected = expected[: request.max_new_tokens]
        assert request.finish_reason in self.reasons
        if request.finish_reason in ("eos", "length"):
            assert request.tokens == expected
            if self.unheard_from is not None:
                assert len(request.tokens) - self.unheard_from <= 1 + DRAFTS, "nobody was there to take these"
        else:
            assert request.tokens == expected[: len(request.tokens)]
        for reader in self.readers:
            assert reader.given == request.tokens[: len(reader.given)]
            if reader.task.done() and not reader.task.cancelled():
                failed = reader.task.exception()
                if len(reader.given) != reader.enough or reader.kind == "reads":
                    assert reader.given == request.tokens
                    assert str(failed) == str(request.error)


class World:
    """A batcher, its callers, and operations on both at random."""

    def __init__(
        self, seed: int, batcher: ContinuousBatcher, expected: Callable[[tuple[int, ...]], list[int]] = whole
    ) -> None:
        self.chance = random.Random(seed)
        self.batcher = batcher
        self.free = batcher.free_pages
        self.expected = expected
        self.asked: list[Asked] = []
        self.loops = [FaultyLoop(self.misbehave) for _ in range(3)]
        self.seen: Counter[str] = Counter()
        self.in_step = False
        self.closes_inside = False

    def play(self, operations: int) -> Counter[str]:
        kinds = {
            self.step: 50,
            self.turn: 20,
            self.submit: 16,
            self.cancel: 3,
            self.cancel_reader: 4,
            self.close_loop: 0.6,
            self.no_memory: 0.5,
        }
        try:
            with self.batcher:
                for operation in self.chance.choices(list(kinds), list(kinds.values()), k=operations):
                    self.seen[operation.__name__] += 1
                    operation()
                self.end()
            self.check()
        finally:
            for reader in (reader for asked in self.asked for reader in asked.readers):
                reader.task.get_coro().close()
            for loop in self.loops:
                loop.close()
        return self.seen

    def step(self) -> None:
        self.in_step = True
        try:
            self.batcher.step()
        finally:
            self.in_step = False

    def turn(self) -> None:
        self.chance.choice(self.loops).turn()

    def submit(self) -> None:
        if sum(not each.request.finished for each in self.asked[-40:]) >= 12:
            return
        prompt = self.chance.choice(PROMPTS)
        request = self.batcher.submit(prompt, max_new_tokens=self.chance.randint(1, LENGTH - len(prompt)))
        asked = Asked(request)
        self.asked.append(asked)
        for _ in range(self.chance.choice((0, 1, 1, 1, 2))):
            kind = self.chance.choice(("reads", "reads", "leaves", "raises", "stays"))
            reader = Reader(kind, self.chance.choice(self.loops), self.chance.randint(1, 10))
            reader.begin(request)
            asked.readers.append(reader)

    def cancel(self) -> None:
        if self.asked:
            asked = self.chance.choice(self.asked[-12:])
            asked.reasons.add("cancelled")
            self.batcher.cancel(asked.request)

    def cancel_reader(self) -> None:
        readers = [reader for asked in self.asked[-12:] for reader in asked.readers if not reader.loop.is_closed()]
        if readers:
            self.chance.choice(readers).task.cancel()

    def close_loop(self) -> None:
        """With all that runs in it, and without a word to it."""
        loop = self.loops.pop(self.chance.randrange(len(self.loops)))
        loop.close()
        for asked in self.of_loop(loop):
            if loop in asked.request._listeners.values() and not asked.request.finished:
                asked.reasons.add("error")
                asked.unheard_from = len(asked.request.tokens)
        self.loops.append(FaultyLoop(self.misbehave))

    def no_memory(self) -> None:
        runner = self.batcher._in_flight._runner
        if isinstance(runner, StubRunner):
            runner.without_memory = True

    def of_loop(self, loop: FaultyLoop) -> list[Asked]:
        return [asked for asked in self.asked if any(reader.loop is loop for reader in asked.readers)]

    def misbehave(self, loop: FaultyLoop) -> None:
        if not self.in_step:
            return
        if self.closes_inside:
            self.seen["close inside"] += 1
            self.batcher.close()
            return
        chance = self.chance.random()
        if chance < 0.01:
            self.seen["raise inside"] += 1
            for asked in self.of_loop(loop):
                asked.reasons.add("error")
            raise OSError("this loop takes nothing")
        if chance < 0.02:
            self.seen["slow inside"] += 1
            time.sleep(0.001)
        elif chance < 0.08:
            self.seen["call inside"] += 1
            self.chance.choice((self.submit, self.cancel, self.cancel_reader, self.step_inside))()

    def step_inside(self) -> None:
        with pytest.raises(BatcherError, match=r"step\(\) already runs in this thread"):
            self.batcher.step()

    def end(self) -> None:
        """Finish all, or close in the middle; then everything must be accounted for."""
        way = self.chance.choice(("run", "close", "close inside"))
        if way != "run":
            for asked in self.asked:
                asked.reasons.add("error")
        self.closes_inside = way == "close inside"
        steps = 0
        while way != "close" and self.batcher.busy:
            self.step()
            steps += 1
            assert steps < 1000, "it never ends"
        self.batcher.close()
        for loop in self.loops:
            for _ in range(3):
                loop.turn()

    def check(self) -> None:
        scheduler = self.batcher._scheduler
        assert self.batcher.free_pages == self.free, "pages are lost"
        assert len(scheduler._request_slots) == 4, "request slots are lost"
        assert not scheduler.busy
        assert not self.batcher.busy
        memory = 0
        for asked in self.asked:
            if "memory is too small" in str(asked.request.error):
                memory += 1
                asked.reasons.add("error")
            asked.check(self.expected(asked.request.prompt))
        assert memory <= self.seen["no_memory"]
        self.seen.update(asked.request.finish_reason for asked in self.asked)
        self.seen["ended early"] += sum("event loop" in str(asked.request.error) for asked in self.asked)
