"""Stand-ins for a drafter's model, which split vLLM's `propose` after its first pass.

A batch with a prompt has any number of tokens, so its first pass is launched. The draft steps after it take one token
of each request, so graphs can hold them: they are captured from a `propose` whose first pass is given.
"""

from __future__ import annotations

from typing import Any

import torch

States = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What a drafter's model returns: the hidden states to sample from, and with some models those for its next step."""


class _StandIn:
    """Answers for a model that vLLM calls as `drafter.model`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def __class__(self) -> type:
        """The model's, because EAGLE-3's drafting asks for it by `isinstance`."""
        return type(self._model)

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise AttributeError("a stand-in has the class of its model")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class FirstPass(_StandIn):
    """Runs the first pass of a `propose` that is to make one draft, and keeps its states instead of sampling."""

    _states: States | None = None
    _sampled: torch.Tensor | None = None

    def __call__(self, **inputs: Any) -> States:
        """The model's own states, padding included."""
        states: States = self._model(**inputs)
        self._states = states
        return states

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Any tensor with a row for each request: the draft of this `propose` is not used."""
        self._sampled = states
        return states

    def get_top_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """The same where vLLM samples without logits."""
        return self.compute_logits(states)[:, 0]

    def taken(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of each request's last token, and forget them.

        Args:
            last: (rows,), the index of each request's last accepted token.

        Returns:
            Those that the first draft is sampled from, and those for the next step; each (rows, width).
        """
        states, sampled = self._states, self._sampled
        assert states is not None, "vLLM's `propose` called no model"
        assert sampled is not None, "vLLM's `propose` sampled no draft"
        self._states = self._sampled = None
        return sampled, states[1][last] if isinstance(states, tuple) else sampled


class GivenFirstPass(_StandIn):
    """Returns given states when it is first called, and then is the model."""

    def __init__(self, model: Any, states: States) -> None:
        super().__init__(model)
        self._states: States | None = states

    def __call__(self, **inputs: Any) -> States:
        """The states, with a row for each token."""
        given, self._states = self._states, None
        states: States = self._model(**inputs) if given is None else given
        return states


def returns_pair(drafter: Any) -> bool:
    """Whether the drafter's model returns the states of its next step beside those to sample from."""
    if hasattr(drafter, "model_returns_tuple"):
        return bool(drafter.model_returns_tuple())
    return bool(drafter.method != "mtp")
