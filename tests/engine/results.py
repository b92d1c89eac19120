"""What a scenario's process hands to the tests: plain data, importable without vLLM."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Mode(str, enum.Enum):
    SYNC = "stock-sync"
    """vLLM as it is on a CPU."""
    ASYNC = "stock-async"
    """vLLM with asynchronous scheduling; only the refusal of its CPU platform is taken away."""
    PLUGIN = "plugin"
    """vLLM as a user has it who installed the plugin and set nothing."""


@dataclass(frozen=True, slots=True)
class Completion:
    prompt: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: tuple[float, ...] = ()
    """Of each token, where they were asked for."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Completion:
        return cls(**data | {"token_ids": tuple(data["token_ids"]), "logprobs": tuple(data["logprobs"])})


@dataclass(frozen=True, slots=True)
class Result:
    scenario: str
    completions: tuple[Completion, ...]
    drafts: int
    accepted: int
    preemptions: int
    cached_tokens: int
    refused: str | None
    """vLLM's sentence, where it did not accept a request."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        return cls(**data | {"completions": tuple(map(Completion.from_json, data["completions"]))})

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts
