"""The part of a step after the model's forward: chooses tokens from logits, and finds the rows that have ended."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from vllm_async_spec.generation.decode_buffers import DecodeBuffers
from vllm_async_spec.generation.end_of_sequence import end_ids, ends_of
from vllm_async_spec.generation.rollback import is_foreign

# They read only the scores. They ignore earlier tokens, whose number changes, and read nothing on the host.
OF_SCORES_ALONE = (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class DecodeTail:
    """Chooses the next tokens as transformers' `_sample` does, on buffers with fixed addresses.

    Args:
        processors: the logits processors, in order.
        criteria: the stopping criteria that the host can't evaluate.
        do_sample: whether tokens are drawn, from the device's default generator.
        pad: int64, one element: the token for ended rows; None if no criterion has an end-of-sequence id.
        device: of the logits.
        compile_with: arguments of `torch.compile` for the operations after the choice, or None.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: list[Any],
        *,
        do_sample: bool,
        pad: torch.Tensor | None,
        device: torch.device,
        compile_with: dict[str, Any] | None = None,
    ) -> None:
        self._processors = processors
        self.do_sample = do_sample
        """Whether tokens are drawn."""
        self._pad = None if pad is None else pad.to(device)
        self._ends = end_ids(criteria, device)
        others = [each for each in criteria if type(each) is not EosTokenCriteria]
        self._write = _write if compile_with is None else torch.compile(_write, dynamic=False, **compile_with)
        self.criteria = StoppingCriteriaList(others) if others else None
        """Criteria that need more than the last token, which `Decode.judge` evaluates; None if there are none."""
        self.may_keep_logits = any(map(is_foreign, processors))
        """Whether a processor may keep the logits that it is given beyond its step."""

    def signature(self) -> tuple[Any, ...] | None:
        """A key for captured tails: equal keys mean equal work. None if the tail can't be captured.

        Reads a few values from the device.
        """
        if self.criteria is not None or any(type(each) not in OF_SCORES_ALONE for each in self._processors):
            return None
        processors = tuple((type(each), _frozen(vars(each))) for each in self._processors)
        return (processors, self.do_sample, _frozen(self._pad), _frozen(self._ends))

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """int64: the padding id and the end-of-sequence ids. A captured tail reads them by address: keep them alive."""
        return tuple(each for each in (self._pad, self._ends) if each is not None)

    def settle(self, buffers: DecodeBuffers, slot: int, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Choose the tokens of one step, and write them and the flags to the buffers of `slot`, 0 or 1.

        The other slot holds the previous step. `ids`, int64 (batch, length), are the tokens so far, which a captured
        tail ignores; `logits` are float32 (batch, vocabulary).
        """
        self._write(buffers, slot, *self._choose(ids, logits), self._pad, self._ends)

    def _choose(self, ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens, int64 (batch,); and if they are drawn, the probabilities that they had, float32 (batch,)."""
        scores = self._processors(ids, logits)
        if not self.do_sample:
            return torch.argmax(scores, dim=-1), None
        # `torch.multinomial` draws one sample the same way, but its checks read the device.
        chances = torch.softmax(scores, dim=-1)
        tokens = torch.argmax(chances / torch.empty_like(chances).exponential_(1), dim=-1)
        return tokens, chances.gather(-1, tokens[:, None])[:, 0]


def _write(
    buffers: DecodeBuffers,
    slot: int,
    tokens: torch.Tensor,
    chances: torch.Tensor | None,
    pad: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> None:
    """Pad ended rows, find rows that end now, and append the tokens; a compiler fuses these small operations."""
    ended = before = buffers.finished[1 - slot]
    if pad is not None:
        tokens = torch.where(before, pad, tokens)
    if ends is not None:
        ended = before | ends_of(tokens, ends)
    if chances is not None:
        # One score that is NaN makes the softmax of its row NaN, and the largest of a row with NaN is NaN. Nobody draws
        # after all rows have ended.
        undrawn = buffers.undrawn[1 - slot] | (chances.isnan().any() & ~before.all())
        buffers.undrawn[slot].copy_(undrawn)
        ended = ended | undrawn
    buffers.write(slot, tokens, ended)


def _frozen(value: Any) -> Any:
    """The value in a form that can be compared and hashed."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist()))
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    return value
