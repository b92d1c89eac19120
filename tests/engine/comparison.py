"""Where the completions of two engines differ first, in words that help to find out why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from results import Completion, Mode, Result

from vllm_async_spec.demo.train import byte_tokenizer

LOGPROB_TOLERANCE = 1e-3
"""Batches of another size add up in another order; a wrong position moves a log-probability by more than 0.1."""

_CONTEXT = 24
"""Tokens, which are bytes here, that are shown before a difference."""


@dataclass(frozen=True, slots=True)
class Outcome:
    results: Mapping[Mode, Result]
    logs: Mapping[Mode, str] = field(repr=False)
    """The whole log of the process that ran it, among others."""

    def __getitem__(self, mode: Mode) -> Result:
        return self.results[mode]

    def difference(self, mode: Mode) -> str | None:
        return first_difference(self[Mode.SYNC].completions, self[mode].completions)


def first_difference(expected: Sequence[Completion], got: Sequence[Completion]) -> str | None:
    """The first request and position that differ in tokens, end, text or log-probabilities; None where nothing does."""
    if len(expected) != len(got):
        return f"{len(got)} requests instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if (difference := _difference(one, other)) is not None:
            return f"request {number}, {_shortened(one.prompt)!r}: {difference}"
    return None


def _difference(expected: Completion, got: Completion) -> str | None:
    for at, (right, wrong) in enumerate(zip(expected.token_ids, got.token_ids, strict=False)):
        if right != wrong:
            before = _decode(expected.token_ids[max(0, at - _CONTEXT) : at])
            return (
                f"token {at} is {wrong} {_decode([wrong])!r} instead of {right} {_decode([right])!r}, after {before!r}"
            )
    facts: tuple[tuple[str, object, object], ...] = (
        ("number of tokens", len(expected.token_ids), len(got.token_ids)),
        ("prompt", expected.prompt, got.prompt),
        ("finish_reason", expected.finish_reason, got.finish_reason),
        ("stop_reason", expected.stop_reason, got.stop_reason),
        ("text", expected.text, got.text),
        ("number of log-probabilities", len(expected.logprobs), len(got.logprobs)),
    )
    for what, one, other in facts:
        if one != other:
            return f"{what} is {other!r} instead of {one!r}"
    for at, (due, found) in enumerate(zip(expected.logprobs, got.logprobs, strict=True)):
        if not abs(due - found) <= LOGPROB_TOLERANCE:  # so that not a number is a difference too
            return f"log-probability of token {at} is {found:.4f} instead of {due:.4f}"
    return None


def _decode(token_ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(token_ids), skip_special_tokens=False))


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= 40 else f"{prompt[:37]}..."
