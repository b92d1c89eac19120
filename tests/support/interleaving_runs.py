"""Interleaved generation beside the loop of transformers, with steps recorded and repeated as CUDA graphs are."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import seeded
from late_device import LateChannel
from recorded_steps import RecordedSteps

from vllm_async_spec import generation
from vllm_async_spec.generation import decode, interleaved, workspace


@pytest.fixture
def recorded():
    with as_graphs():
        yield


@contextlib.contextmanager
def as_graphs() -> Iterator[None]:
    """Steps are recorded and repeated, as on a GPU; what was kept for models before is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "StepGraphs", RecordedSteps)
        patch.setattr(interleaved, "_captures", lambda switches, device: switches.cuda_graphs)
        patch.setattr(workspace, "_kept", type(workspace._kept)())
        yield


class Favours(transformers.LogitsProcessor):
    """A custom processor that looks at how many tokens there are, and at the last of them."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = (input_ids[:, -1] + input_ids.shape[1]) % scores.shape[1]
        return scores + 3.0 * torch.nn.functional.one_hot(favoured, scores.shape[1])


def both(kind: str, inputs: dict[str, Any], way: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    """Generate as transformers does and with our loop, from the same seed: tokens, and the generator's state."""
    model = tiny_models.model(kind)
    cache = {"cache_implementation": "static"} if way.get("static_cache", True) else {}
    ours = {"custom_generate": generation.generate, **way}
    return seeded(model, inputs, cache, **kwargs), seeded(model, inputs, ours, **kwargs)


def assert_same(expected: tuple[Any, Any], found: tuple[Any, Any]) -> None:
    assert torch.equal(expected[0], found[0])
    assert expected[0].stride() == found[0].stride()
    assert torch.equal(expected[1], found[1]), "the random generator is elsewhere"


def ways() -> dict[str, Any]:
    return {"interleaved": True, "open_channel": LateChannel(1).open}
