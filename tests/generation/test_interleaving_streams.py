"""The orders between the streams of interleaved generation, on simulated streams: each is needed, all are enough."""

import contextlib
import functools
from typing import Any

import pytest
import tiny_models
import torch
from generating import may_wait
from simulated_streams import Stream, simulated

from vllm_async_spec import generation
from vllm_async_spec.generation import workspace
from vllm_async_spec.generation.flag_channel import CudaFlagChannel, FinishTracker
from vllm_async_spec.generation.slots import CudaSlots

pytestmark = may_wait
SEEDS = range(12)
PROMPTS = 54
"""A seed of prompts: from these the model comes to token 5 late, though it comes to it."""
SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 5}


@functools.cache
def synchronous(**settings: Any) -> torch.Tensor:
    expected: torch.Tensor = tiny_models.model("llama").generate(
        **tiny_models.prompts([3], "left", PROMPTS), **SETTINGS | settings
    )
    assert settings or 20 < expected.shape[1] - 3 < 35, "the rows don't stop in between"
    return expected


def differ(seed: int, *, taken: list[tuple[Any, str]], **settings: Any) -> bool:
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3], "left", PROMPTS)
    expected = synchronous(**settings)
    with simulated(seed) as patch:
        # Made before something is taken away, and filled with what no generation leaves.
        way: dict[str, Any] = {"custom_generate": generation.generate, "interleaved": True, "max_in_flight": 3}
        way["open_channel"] = CudaFlagChannel
        model.generate(**inputs, **{**SETTINGS, "max_new_tokens": 60}, **way)
        workspace._kept[model].buffers.sequences.fill_(7)
        for owner, name in taken:
            patch.setattr(owner, name, lambda *_: None)
        with contextlib.suppress(IndexError):
            return not torch.equal(expected, model.generate(**inputs, **SETTINGS | settings, **way))
    return True


def test_the_orders_are_enough():
    assert not any(differ(seed, taken=[]) for seed in SEEDS)


@pytest.mark.parametrize(
    ("taken", "settings"),
    [
        ([(CudaSlots, "_await_step")], {}),
        ([(CudaSlots, "_await_reading")], {}),
        # The flags are behind the last step and the caller is behind them: only together do these not hold it back.
        ([(CudaSlots, "end"), (CudaFlagChannel, "join"), (FinishTracker, "drain")], {"eos_token_id": None}),
        ([(Stream, "wait_stream")], {}),
    ],
    ids=["the step before", "the reading of flags", "the last steps", "the step of the flags"],
)
def test_each_order_is_needed(taken: list[tuple[Any, str]], settings: dict[str, Any]):
    wrong = any(differ(seed, taken=taken, **settings) for seed in SEEDS)
    assert wrong, "it could be left out, or the streams are too orderly to show it"
