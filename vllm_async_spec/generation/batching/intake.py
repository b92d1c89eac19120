"""Turns what a caller submits into a request that can be served."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from vllm_async_spec.generation.batching.request import Request, RequestError

Prompt = str | Sequence[int] | torch.Tensor
"""Token ids, in a sequence or a tensor, or text where there is a tokenizer."""

_COLDEST, _HOTTEST = 0.01, torch.finfo(torch.float32).max


class Intake:
    """Makes requests, and refuses in the caller's thread whatever would make a step fail.

    Args:
        tokenizer: encodes prompts that are strings; None if there are none.
        vocabulary: number of tokens in the model's vocabulary.
        samples: whether a request may have a temperature other than 0.
        check: raises `RequestError` for a request that can never fit the batch.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, *, samples: bool, check: Callable[[Request], None]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._samples = samples
        self._check = check
        self._owner = object()

    def request(self, prompt: Prompt, max_new_tokens: int, temperature: float, seed: int | None) -> Request:
        """Make a request; arguments as for `ContinuousBatcher.submit`.

        Raises:
            RequestError: the request can never be served.
        """
        made = Request(
            self._encoded(prompt),
            _whole("max_new_tokens", max_new_tokens),
            _number("temperature", temperature),
            0 if seed is None else _whole("seed", seed),
        )
        if made.temperature != 0 and not _COLDEST <= made.temperature <= _HOTTEST:
            raise RequestError(
                f"temperature is {temperature}; it must be 0, which is greedy, or from {_COLDEST} to {_HOTTEST:.3g}"
            )
        if made.temperature != 0 and not self._samples:
            raise RequestError(
                f"temperature is {temperature}, and a batcher with a draft model decodes greedily; "
                "leave temperature at 0, or make the batcher without draft_model"
            )
        if not -(1 << 63) <= made.seed < 1 << 63:
            raise RequestError(f"seed is {seed}; it must fit into 64 bits")
        self._check(made)
        for token in (min(made.prompt), max(made.prompt)):
            if not 0 <= token < self._vocabulary:
                raise RequestError(
                    f"the prompt has token {token}; the model's vocabulary is 0 to {self._vocabulary - 1}"
                )
        if seed is None and made.temperature != 0:
            # Last, so that neither a refused request nor a greedy one moves the caller's generator.
            made.seed = _drawn_seed()
        made.owner = self._owner
        return made

    def made(self, request: Request) -> bool:
        """Whether this made the request, and no other batcher's intake."""
        return request.owner is self._owner

    def _encoded(self, prompt: Prompt) -> tuple[int, ...]:
        tokens: Any = prompt
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    "the prompt is text, and the batcher has no tokenizer; give token ids, or make the batcher with one"
                )
            tokens = self._tokenizer(prompt)["input_ids"]
        if isinstance(tokens, (bytes, bytearray, Mapping, Set)):
            raise RequestError(f"the prompt is {reprlib.repr(tokens)}; give a list of token ids, or text")
        if isinstance(tokens, torch.Tensor):
            if tokens.dtype == torch.bool:
                raise RequestError("the prompt is a tensor of bool, such as a mask; give the token ids")
            if tokens.shape[:-1].numel() > 1:
                raise RequestError(f"the prompt has the shape {tuple(tokens.shape)}; submit each row on its own")
            tokens = tokens.flatten().tolist()
        try:
            return tuple(operator.index(token) for token in tokens)
        except TypeError:
            raise RequestError(f"the prompt is {reprlib.repr(tokens)}; it must be whole numbers, or text") from None


def _drawn_seed() -> int:
    """A seed from PyTorch's default CPU generator, which `torch.manual_seed` sets."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name} is {value!r}; it must be a number") from None


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}; it must be a whole number") from None
