"""Batchers of a tiny model, prompts for them, and what `generate` of transformers makes of these."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import tiny_models
import torch
from generating import batcher_of
from hypothesis import strategies as st
from late_device import LateStreams

from vllm_async_spec.generation import ContinuousBatcher
from vllm_async_spec.generation.batching import Request

EOS = [2, 5]
LENGTH = 64
DRAFTS = 3
"""Draft tokens of a step, where a test needs a GPU."""


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(1, tiny_models.VOCABULARY) for _ in range(length)] for length in lengths]


LENGTHS = [3, 1, 9, 20, 5, 7, 40, 2]
PROMPTS = prompts(LENGTHS)


def generated(kind: str, prompt: list[int], new_tokens: int, eos: Sequence[int] = EOS) -> list[int]:
    ids = torch.tensor([prompt])
    made = tiny_models.model(kind).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return made[0, len(prompt) :].tolist()


def make(kind: str = "llama", **options: Any) -> ContinuousBatcher:
    settings = {"max_batch": 3, "max_length": LENGTH, "max_prefill_tokens": 16, "eos_token_id": EOS}
    return batcher_of(tiny_models.model(kind), **(settings | options))


def submit_all(batcher: ContinuousBatcher, new_tokens: int = 20, temperature: float = 0.0) -> list[Request]:
    """Submit all prompts, each with a seed of its own."""
    options = {"max_new_tokens": new_tokens, "temperature": temperature}
    return [batcher.submit(prompt, seed=seed, **options) for seed, prompt in enumerate(PROMPTS)]


def tokens(kind: str = "llama", temperature: float = 0.0, new_tokens: int = 20, **options: Any) -> list[list[int]]:
    with make(kind, **options) as batcher:
        free = batcher.free_pages
        found = submit_all(batcher, new_tokens, temperature)
        batcher.run()
        assert batcher.free_pages == free
        return [request.result() for request in found]


WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {"synchronous": True},
    "asynchronous": {},
    "two steps ahead": {"steps_ahead": 2},
    "late": {"open_streams": LateStreams().open},
    "late, two steps ahead": {"open_streams": LateStreams().open, "steps_ahead": 2},
    "late now and then": {"open_streams": LateStreams(seed=0).open},
    "one prompt a step": {"max_prefills": 1, "decode_sizes": [3]},
    "all at once": {"max_batch": 8, "max_prefill_tokens": 100},
    "small cache": {"cache_tokens": LENGTH, "page_size": 4},
}


RUNS: dict[str, st.SearchStrategy[Any]] = {
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=9),
    "new_tokens": st.integers(1, 24),
    "ahead": st.integers(1, 3),
    "batch": st.integers(1, 5),
    "page_size": st.sampled_from([1, 3, 16]),
    "seed": st.integers(0, 99),
}
"""Sizes of random runs, and the seed of their prompts and of what is late."""


async def collect(tokens: Any) -> list[int]:
    return [token async for token in tokens]


LONG = {"max_length": 1000, "eos_token_id": []}
"""For requests that don't end by themselves while a test looks."""


@contextlib.contextmanager
def failing(model: Any, calls: set[int], error: Exception) -> Iterator[None]:
    """Let the model's calls of these numbers fail, after its first layer has written its keys and values."""
    count = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(count) in calls:
            raise error

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()
