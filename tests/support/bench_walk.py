"""What an engine with arranged weights emits, step by step, without an engine."""

from benchmarks.acceptance import Orbit
from benchmarks.timing import Step


def walk(orbit: Orbit, tokens: int, draft_tokens: int, start: int) -> list[int]:
    current, emitted = int(orbit.successor[start]), [1]
    while sum(emitted) < tokens:
        accepted = 0
        while accepted < draft_tokens and not orbit.wrong[current]:
            current, accepted = int(orbit.successor[current]), accepted + 1
        current = int(orbit.successor[current])
        emitted.append(min(accepted + 1, tokens - sum(emitted)))
    return emitted


def as_steps(requests: list[list[int]]) -> list[Step]:
    longest = max(map(len, requests))
    return [
        Step(
            float(at),
            {str(name): tokens[at] for name, tokens in enumerate(requests) if at < len(tokens)},
            frozenset(str(name) for name, tokens in enumerate(requests) if at == len(tokens) - 1),
        )
        for at in range(longest)
    ]
