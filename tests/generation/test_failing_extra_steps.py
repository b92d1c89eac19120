"""An extra step that raises, where transformers' loop has ended by then."""

from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import late, seeded
from interleaving_runs import assert_same, recorded
from late_device import LateChannel

from vllm_async_spec.generation import async_generate

__all__ = ["recorded"]

PROMPT = 4
ALLOWED = [5, 6, 2]
"""A grammar of three tokens, the last of which ends the sequence; nothing may come later."""
WAYS: dict[str, dict[str, Any]] = {
    "stopping": {},
    "growing": {"interleaved": True, "static_cache": False},
    "static": {"interleaved": True, "cuda_graphs": False},
    "graphs": {"interleaved": True},
}


class Grammar(transformers.LogitsProcessor):
    """Draws a number at each step, as processors may, then allows one token, or fails."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        only = torch.full_like(scores, float("-inf"))
        only[:, ALLOWED[input_ids.shape[1] - PROMPT]] = 0  # an IndexError after the end
        return only


class Schedule(transformers.StoppingCriteria):
    """Stops at the third token, by a list that has no place for a fourth."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stops = [False, False, True][input_ids.shape[1] - PROMPT - 1]
        return torch.full((len(input_ids),), stops)


CASES: dict[str, dict[str, Any]] = {
    "grammar": {"logits_processor": [Grammar()], "eos_token_id": 2},
    "criterion": {"stopping_criteria": [Schedule()]},
}


def run(way: dict[str, Any], channel: LateChannel, **given: Any) -> tuple[Any, Any]:
    return seeded(tiny_models.model("llama"), tiny_models.prompts([PROMPT]), late(channel, **way), **given)


@pytest.mark.parametrize("lateness", [0, 1, 9])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_what_only_an_extra_step_raises_is_dropped(recorded: None, way: str, case: str, lateness: int):
    if way == "stopping" and lateness and not async_generate._MARKS_GIVEN_CACHES:
        pytest.skip("in transformers 4.57 any cache may be the caller's, so what an extra step raises is raised")
    given = {"max_new_tokens": 12, "do_sample": False, **CASES[case]}
    model, prompt = tiny_models.model("llama"), tiny_models.prompts([PROMPT])
    expected = seeded(model, prompt, {"cache_implementation": "static"}, **given)
    assert expected[0].shape[1] == PROMPT + 3
    for _ in range(2):  # and the next generation is right
        assert_same(expected, run(WAYS[way], LateChannel(lateness), **given))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_step_of_the_generation_raises_is_raised(recorded: None, way: str):
    given = {"max_new_tokens": 12, "logits_processor": [Grammar()], "eos_token_id": 7}
    with pytest.raises((IndexError, ValueError), match="list index out of range"):
        run(WAYS[way], LateChannel(9), **given)


def test_where_the_cache_outlives_the_call_it_is_raised(recorded: None):
    """The cache may hold a part of the step, so it can't be given back."""
    given = {"max_new_tokens": 12, "return_dict_in_generate": True, **CASES["grammar"]}
    with pytest.raises(IndexError):
        run({}, LateChannel(9), past_key_values=transformers.DynamicCache(), **given)
