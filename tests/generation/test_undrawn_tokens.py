"""Scores from which no token can be drawn: stock raises, and interleaved generation raises too, however late."""

import math
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import Spoils, may_wait
from interleaving_runs import as_graphs, assert_same, both, ways
from late_device import LateChannel

from vllm_async_spec import generation
from vllm_async_spec.generation import decode_tail

pytestmark = may_wait
WAYS = {
    "late flags": ways(),
    "late flags, growing cache": {**ways(), "static_cache": False},
    "synchronous": {"interleaved": False, "static_cache": True},
}


def generated(way: dict[str, Any], length: int, score: float, **kwargs: Any) -> Any:
    model = tiny_models.model("llama")
    processors = transformers.LogitsProcessorList([Spoils(length, score)])
    kwargs = {"max_new_tokens": 12, "do_sample": True, "logits_processor": processors, **kwargs}
    return model.generate(**tiny_models.prompts([3, 2]), **kwargs, **way)


@pytest.mark.parametrize("score", [math.nan, math.inf])
@pytest.mark.parametrize("length", [3, 8, 14])
@pytest.mark.parametrize("way", WAYS)
def test_what_can_not_be_drawn_is_an_error_as_in_stock(way: str, length: int, score: float):
    with pytest.raises(RuntimeError, match="probability tensor"):
        generated({}, length, score)
    with pytest.raises(RuntimeError, match=r"no token can be drawn .* pass do_sample=False"):
        generated({"custom_generate": generation.generate, **WAYS[way]}, length, score)
    generated({"custom_generate": generation.generate, **WAYS[way]}, 99, score)  # nothing is left of it


@pytest.mark.parametrize("way", WAYS)
def test_a_score_of_minus_infinity_forbids_a_token_and_no_more(way: str):
    tokens = generated({"custom_generate": generation.generate, **WAYS[way]}, 0, -math.inf)
    assert tokens.shape == (2, 15)


def test_a_captured_step_that_can_not_draw_is_an_error(monkeypatch: pytest.MonkeyPatch):
    chances = torch.softmax
    spoiled = False

    def softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
        return chances(scores, dim) * (math.nan if spoiled else 1.0)

    monkeypatch.setattr(decode_tail.torch, "softmax", softmax)
    settings = {"max_new_tokens": 12, "do_sample": True}
    with as_graphs():
        assert_same(*both("llama", tiny_models.prompts([3, 2]), ways(), **settings))
        spoiled = True
        generation.release(tiny_models.model("llama"))
        with pytest.raises(RuntimeError, match="no token can be drawn"):
            both("llama", tiny_models.prompts([3, 2]), ways(), **settings)


def test_an_extra_step_that_can_not_draw_is_nobodys_error():
    model, inputs = tiny_models.model("llama"), tiny_models.prompts([3])
    late = {"interleaved": True, "open_channel": LateChannel(3).open, "poll_every": 2, "max_in_flight": 2}
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(0)
    whole = model.generate(**inputs, **settings)[0].tolist()
    end = next(at for at in range(6, 12) if whole[at] not in whole[:at])
    seen = []
    for way in ({}, {"custom_generate": generation.generate, **late}):
        torch.manual_seed(0)
        spoil = transformers.LogitsProcessorList([Spoils(end + 1, math.nan)])
        seen.append(model.generate(**inputs, **settings, eos_token_id=whole[end], logits_processor=spoil, **way))
    assert seen[0].shape == (1, end + 1)
    assert torch.equal(*seen)
