"""What a request asks of its sampler beside the likeliest token, and which token that makes it.

The runner needs a request's tokens on the host for penalties, bad words and min_tokens, the scheduler for grammars.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 128
RANKED = np.float32(8) - np.float32(0.0937) * np.arange(VOCABULARY, dtype=np.float32)
"""Logits of the model's token and of those that follow it, in a circle: what is not wanted goes to the next."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Sampling parameters; `bad_words` are pairs of tokens of which the second must not follow the first.

    `grammar`: of so many tokens one is not allowed, another at each place; 0 for none.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bad_words: tuple[tuple[int, int], ...] = ()
    min_tokens: int = 0
    grammar: int = 0
    logprobs: bool = False

    @property
    def penalties(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    def parameters(self) -> dict[str, Any]:
        """Those of vLLM's `SamplingParams`, but for bad words, which it takes as text."""
        return {
            "repetition_penalty": self.repetition,
            "frequency_penalty": self.frequency,
            "presence_penalty": self.presence,
            "min_tokens": self.min_tokens,
            "logprobs": 0 if self.logprobs else None,
        }

    def allowed(self, outputs: Sequence[int]) -> Any:
        last = outputs[-1] if outputs else 0
        return (np.arange(VOCABULARY) * 5 + 3 * last + len(outputs)) % self.grammar != 0

    def token(self, first: int, prompt: Sequence[int], outputs: Sequence[int], stop: int) -> int:
        logits = np.roll(RANKED, first)
        counts = np.bincount(np.array(outputs, dtype=np.int64), minlength=VOCABULARY).astype(np.float32)
        been = counts > 0
        been[list(prompt)] = True
        divided = np.where(been, np.float32(self.repetition), np.float32(1))
        logits = logits * np.where(logits > 0, np.float32(1) / divided, divided)
        logits = logits - np.float32(self.frequency) * counts - np.float32(self.presence) * (counts > 0)
        for before, after in self.bad_words:
            if outputs and outputs[-1] == before:
                logits[after] = -np.inf
        if len(outputs) < self.min_tokens and stop >= 0:
            logits[stop] = -np.inf
        if self.grammar:
            logits[~self.allowed(outputs)] = -np.inf
        return int(logits.argmax())


PLAIN = Wishes()


def penalties(choose: random.Random) -> Wishes:
    return choose.choice([Wishes(frequency=1.7), Wishes(repetition=1.3), Wishes(presence=1.1), Wishes(1.2, 0.6, 0.3)])
