"""Logits from which no token can be drawn: the request fails in a sentence, and no other request notices."""

import math

import pytest
import tiny_models
import torch
from small_batchers import EOS, PROMPTS, generated

from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.batching import RequestError, decoding
from vllm_async_spec.generation.batching.request import UNDRAWN
from vllm_async_spec.generation.batching.sampling import sample

pytestmark = pytest.mark.timeout(120)
SPOILED = 101
"""Seed of the request whose logits are spoiled."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sampled_row_without_probabilities_is_undrawn(value: float, device: str):
    logits = torch.randn(4, 9, device=device)
    logits[1:3, 4] = value
    temperature, rows = torch.tensor([1.0, 1.0, 0.0, 0.5], device=device), torch.arange(4, device=device)
    tokens = sample(logits, temperature, rows, rows).tolist()
    assert tokens[1] == UNDRAWN
    assert tokens[2] == 4, "transformers gives a greedy row the same token"
    assert min(tokens[0], tokens[3]) >= 0
    nothing = torch.full((1, 9), -math.inf, device=device)
    assert sample(nothing, torch.ones(1, device=device), rows[:1], rows[:1]).item() == UNDRAWN


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_only_the_request_that_can_not_be_drawn_fails(monkeypatch: pytest.MonkeyPatch, at: int, steps_ahead: int):
    first = len(PROMPTS[0]) - 1 + at

    def spoiled(
        logits: torch.Tensor, temperature: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        bad = (seeds == SPOILED) & (positions >= first)
        return sample(logits.masked_fill(bad[:, None], math.nan), temperature, seeds, positions)

    monkeypatch.setattr(decoding, "sample", spoiled)
    expected = generated("llama", PROMPTS[1], 20)
    synchronous = steps_ahead == 0
    config = BatcherConfig(
        max_batch=3, max_length=64, eos_token_id=EOS, steps_ahead=max(steps_ahead, 1), synchronous=synchronous
    )
    with ContinuousBatcher(tiny_models.model("llama"), config=config) as batcher:
        failing = batcher.submit(PROMPTS[0], max_new_tokens=20, temperature=1.0, seed=SPOILED)
        greedy = batcher.submit(PROMPTS[1], max_new_tokens=20)
        sampled = [batcher.submit(PROMPTS[2], max_new_tokens=20, temperature=1.0, seed=3) for _ in range(2)]
        batcher.run()
        assert greedy.result() == expected
        assert sampled[0].result() == sampled[1].result()
        with pytest.raises(
            RequestError, match=r"no token can be drawn .* NaN or infinite; look at the model's weights"
        ):
            failing.result()
        assert failing.finish_reason == "error"
        assert len(failing.tokens) == at
        assert UNDRAWN not in failing.tokens
