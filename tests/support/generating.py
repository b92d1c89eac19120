"""What tests of `generate` have in common: one seeded call, stopping criteria of one's own, outputs held to others."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from hypothesis import strategies as st
from late_device import LateChannel

from vllm_async_spec import generation
from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.batching.streams import CudaStreams, Work
from vllm_async_spec.generation.cache_argument import CACHE

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


may_wait = pytest.mark.filterwarnings("ignore::vllm_async_spec.generation.SynchronousGenerationWarning")


def late(channel: LateChannel, **options: Any) -> dict[str, Any]:
    """Arguments for asynchronous stopping whose flags this channel sends."""
    return {"custom_generate": generation.generate, "open_channel": channel.open, **options}


class Spoils(transformers.LogitsProcessor):
    """Scores of the last row that no softmax can take, from sequences of `length` tokens on."""

    def __init__(self, length: int, score: float) -> None:
        self.length, self.score = length, score

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        spoiled = scores.clone()
        spoiled[-1, :3] = self.score
        return spoiled


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


@st.composite
def ways_to_stop(draw: st.DrawFn, lengths: list[int]) -> dict[str, Any]:
    """Arguments for `generate` of prompts of these lengths, with some of the ways to stop."""
    ways = draw(st.sets(st.sampled_from(["eos", "stop strings", "custom", "once", "time"])))
    custom: list[Any] = []
    if "custom" in ways:
        custom.append(RowsStopAt([max(lengths) + draw(st.integers(1, 9)) for _ in lengths]))
    if "once" in ways:
        custom.append(StopsOnceOn(draw(st.integers(0, tiny_models.VOCABULARY - 1))))
    if "stop strings" in ways:
        custom.append(transformers.StopStringCriteria(tiny_models.tokenizer(), draw(st.sampled_from(["c", "de", "f"]))))
    return {
        "eos_token_id": draw(st.sampled_from([2, [2, 3, 5, 8]])) if "eos" in ways else None,
        "stopping_criteria": lambda: transformers.StoppingCriteriaList(custom),
        **({"max_time": draw(st.integers(1, 9)) - 0.5} if "time" in ways else {}),
    }


def batcher_of(model: Any, tokenizer: Any = None, **options: Any) -> ContinuousBatcher:
    """A batcher of these settings, and of the arguments that are none."""
    given = {name: options.pop(name) for name in ("draft_model", "open_streams") if name in options}
    return ContinuousBatcher(model, tokenizer, BatcherConfig(**options), **given)


_LATE = 10_000_000
"""Cycles: some milliseconds, which no host needs between two steps."""


def make_batches_late(patch: pytest.MonkeyPatch) -> None:
    """Have each step of continuous batching keep the GPU longer than any host needs to prepare one."""
    compute = CudaStreams.compute

    def late(self: CudaStreams, slot: int, work: Work) -> None:
        def work_and_sleep() -> None:
            work()
            torch.cuda._sleep(_LATE)

        compute(self, slot, work_and_sleep)

    patch.setattr(CudaStreams, "compute", late)


def seeded(model: Any, inputs: dict[str, Any], way: dict[str, Any], **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """Generate from one seed: the output, and the generator's state afterwards; callables make arguments."""
    torch.manual_seed(5)
    given = {name: make() if callable(make) else make for name, make in kwargs.items()}
    with pytest.MonkeyPatch.context() as patch:
        # A clock that goes on by a second with each reading: a step reads it once, in either loop.
        clock = SimpleNamespace(time=itertools.count().__next__)
        patch.setattr("transformers.generation.stopping_criteria.time", clock)
        output = model.generate(**inputs, **given, **way)
    return output, torch.get_rng_state()


def assert_same(synchronous: Any, asynchronous: Any) -> None:
    if isinstance(synchronous, torch.Tensor):
        assert type(synchronous) is type(asynchronous)
        assert torch.equal(synchronous, asynchronous)
        assert synchronous.stride() == asynchronous.stride()
        return
    assert set(synchronous.keys()) == set(asynchronous.keys())
    for name in synchronous:
        if name == CACHE:
            assert_same_cache(synchronous[name], asynchronous[name])
        else:
            assert_same_tree(name, synchronous[name], asynchronous[name])


def assert_same_tree(name: str, one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert type(one) is type(other), name
        assert torch.equal(one, other), name
        return
    assert (one is None) == (other is None), name
    if one is not None:
        assert len(one) == len(other), name
        for a, b in zip(one, other, strict=True):
            assert_same_tree(name, a, b)


def assert_same_cache(one: Any, other: Any) -> None:
    assert int(one.get_seq_length()) == int(other.get_seq_length())
    for part in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(one, part):
            assert_same_cache(getattr(one, part), getattr(other, part))
            return
    assert len(one.layers) == len(other.layers)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert int(a.get_seq_length()) == int(b.get_seq_length())
        assert int(getattr(a, "cumulative_length", 0)) == int(getattr(b, "cumulative_length", 0))
