"""Ten thousand operations on a batcher whose callers misbehave, inside its steps too; see `caller_faults`."""

import random
from collections import Counter
from typing import Any

import pytest
import tiny_models
from caller_faults import DRAFTS, LENGTH, PROMPTS, STOP, World, stubbed
from generating import batcher_of
from late_device import LateStreams
from small_batchers import generated
from test_batching_drafts import drafter

from vllm_async_spec.generation import ContinuousBatcher
from vllm_async_spec.generation.batching import Request
from vllm_async_spec.generation.batching.scheduler import Scheduler

FAULTS = ("close inside", "raise inside", "slow inside", "call inside", "close_loop", "no_memory", "ended early")
REASONS = ("eos", "length", "cancelled", "error")


def make(seed: int) -> ContinuousBatcher:
    options: dict[str, Any] = {"steps_ahead": 1 + seed % 3, "synchronous": seed % 5 == 0}
    if seed % 2:
        options |= {"draft_model": drafter("llama", "noisy"), "draft_tokens": DRAFTS}
    return batcher_of(
        tiny_models.model("llama"),
        max_batch=4,
        max_length=LENGTH,
        max_prefill_tokens=16,
        page_size=4,
        cache_tokens=3 * LENGTH,
        eos_token_id=STOP,
        open_streams=LateStreams(seed).open,
        **options,
    )


def play(operations: int, first: int = 0) -> Counter[str]:
    seen: Counter[str] = Counter()
    seed, done = first, 0
    with stubbed():
        while done < operations:
            count = random.Random(seed).randint(100, 900)
            seen += World(seed, make(seed)).play(count)
            seed, done = seed + 1, done + count
    return seen


def test_ten_thousand_operations_lose_nothing_and_give_nothing_twice():
    seen = play(10_000)
    assert all(seen[fault] > 3 for fault in FAULTS), seen
    assert all(seen[reason] > 50 for reason in REASONS), seen


@pytest.mark.slow
def test_two_hundred_thousand_operations_lose_nothing_and_give_nothing_twice():
    play(200_000, first=1000)


def test_with_a_model_too():
    expected = {prompt: generated("llama", list(prompt), LENGTH - len(prompt), [STOP]) for prompt in PROMPTS}
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += World(seed, make(seed), expected.__getitem__).play(250)
    assert seen["call inside"] > 3, seen


def tell_unguarded(self: Request) -> None:
    for changed, loop in self._listeners.copy().items():
        loop.call_soon_threadsafe(changed.set)


def tell_deaf(self: Request) -> None:
    try:
        tell_unguarded(self)
    except Exception:
        return


def emit_twice(self: Request, tokens: list[int]) -> Any:
    self.tokens.extend(tokens if len(self.tokens) != 5 else [*tokens, *tokens])
    return self._tell()


def emit_and_forget(self: Request, tokens: list[int]) -> Any:
    if len(self.tokens) != 5:
        self.tokens.extend(tokens)
    return self._tell()


def keep_pages(self: Scheduler, job: Any) -> None:
    if job.request.finish_reason != "error":
        release(self, job)


release = Scheduler._release_if_left


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Request, "_tell", tell_unguarded),
        (Request, "_tell", tell_deaf),
        (Request, "emit", emit_twice),
        (Request, "emit", emit_and_forget),
        (Scheduler, "_release_if_left", keep_pages),
    ],
    ids=["a loop's error ends the batcher", "a loop's error ends nothing", "twice", "lost", "pages are kept"],
)
def test_each_fault_of_the_batcher_s_own_is_seen(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, OSError, RuntimeError)):
        play(10_000)
