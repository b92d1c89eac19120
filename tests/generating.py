"""What tests of `generate` have in common: one seeded call, and stopping criteria of one's own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers


class RowsStopAt(transformers.StoppingCriteria):
    """A custom criterion: row i stops for good once it has `lengths[i]` tokens."""

    def __init__(self, lengths: list[int], device: str = "cpu"):
        self.lengths = torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert input_ids.is_contiguous()
        return self.lengths <= input_ids.shape[1]


class StopsOnceOn(transformers.StoppingCriteria):
    """A custom criterion that says stop at one step only: rows must stay stopped afterwards."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def seeded(model: Any, inputs: dict[str, Any], way: dict[str, Any], **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """Generate from the same seed each time: the output, and the generator's state afterwards.

    What of `kwargs` can be called makes the argument anew, so that nothing is shared by two calls.
    """
    torch.manual_seed(5)
    given = {name: make() if callable(make) else make for name, make in kwargs.items()}
    with pytest.MonkeyPatch.context() as patch:
        # A clock that goes on by a second with each reading: a step reads it once, in either loop.
        clock = SimpleNamespace(time=itertools.count().__next__)
        patch.setattr("transformers.generation.stopping_criteria.time", clock)
        output = model.generate(**inputs, **given, **way)
    return output, torch.get_rng_state()
