"""Fixtures: `enable()` with a late device in the place of CUDA, and warnings that were not given yet."""

from collections.abc import Iterator

import pytest
from late_device import LateChannel

from vllm_async_spec import generation
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that are given once a process have not been given."""
    monkeypatch.setattr("vllm_async_spec.generation.stopping_criteria._said", set())


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch, nothing_said: None) -> Iterator[LateChannel]:
    """`enable()`, with a late device in the place of CUDA."""
    channel = LateChannel(2)
    monkeypatch.setattr(
        "vllm_async_spec.generation.async_generate.AsyncStoppingCriteriaList",
        type("Late", (AsyncStoppingCriteriaList,), {
            "__init__": lambda self, *args, **kwargs: AsyncStoppingCriteriaList.__init__(
                self, *args, **{**kwargs, "open_channel": channel.open}
            )
        }),
    )  # fmt: skip
    generation.enable()
    yield channel
    generation.disable()
