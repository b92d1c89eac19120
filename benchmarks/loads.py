"""Loads of an engine: how many requests, how long, and how many at once. All are seeded."""

import random
from collections.abc import Iterable
from dataclasses import dataclass


class LoadError(ValueError):
    """No such load exists; the message lists all loads."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load; `prompt` and `output` are the fewest and the most tokens of a request."""

    name: str
    requests: int
    running: int
    """Requests that run at once, at most; the next arrives when one has finished."""
    prompt: tuple[int, int]
    output: tuple[int, int]
    seed: int = 0

    @property
    def steady(self) -> bool:
        """Whether all requests run from the beginning; the speed of such a load is the time of a step."""
        return self.requests == self.running

    @property
    def longest(self) -> int:
        """Most tokens that a request can have, prompt and output."""
        return self.prompt[1] + self.output[1]


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int


def make_requests(load: Load, vocabulary: int) -> list[Request]:
    """The requests of `load`, the same each time: lengths and token ids are uniform."""
    source = random.Random(load.seed)
    return [
        Request(
            tuple(source.randrange(vocabulary) for _ in range(source.randint(*load.prompt))),
            source.randint(*load.output),
        )
        for _ in range(load.requests)
    ]


def find_loads(names: Iterable[str]) -> tuple[Load, ...]:
    """The loads of these names.

    Raises:
        LoadError: a name has no load.
    """
    names = tuple(names)
    for name in names:
        if name not in LOADS:
            raise LoadError(f"there is no load {name!r}; there are {', '.join(LOADS)}")
    return tuple(LOADS[name] for name in names)


def _decode(batch: int, *, output: int = 200, suffix: str = "") -> Load:
    return Load(f"decode-{batch}{suffix}", batch, batch, (64, 64), (output, output))


def _context(batch: int, thousands: int) -> Load:
    """Decoding after long prompts; all loads of contexts have about as many tokens."""
    tokens = thousands * 1024
    return Load(f"context-{thousands}k", batch, batch, (tokens, tokens), (200, 200))


LOADS = {
    load.name: load
    for load in (
        _decode(1),
        _decode(8),
        _decode(32),
        _decode(128),
        Load("mixed", requests=256, running=32, prompt=(64, 512), output=(16, 128)),
        _context(32, 1),
        _context(8, 8),
        _context(2, 32),
        _decode(1, output=96, suffix="-short"),
        _decode(4, output=96, suffix="-short"),
        Load("mixed-short", requests=24, running=4, prompt=(16, 64), output=(8, 32)),
    )
}
