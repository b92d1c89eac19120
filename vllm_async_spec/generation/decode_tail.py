"""What follows the model's forward in a step: from logits to tokens, and which rows have ended."""

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

# They read the scores alone: not the tokens before, whose number changes; and they read nothing on the host.
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
    """The choice of the next tokens as `_sample` of transformers makes it, on buffers that stay where they are.

    Args:
        processors: the logits processors, in order.
        criteria: the stopping criteria that need a device.
        do_sample: whether tokens are drawn, from the device's default generator.
        pad: int64, one element, what an ended row gets; None where no criterion knows of an end of sequence.
        device: where logits are.
        compile_with: arguments of `torch.compile` for what follows the choice, or None.
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
        self._do_sample = do_sample
        self._pad = None if pad is None else pad.to(device)
        self._ends = end_ids(criteria, device)
        others = [each for each in criteria if type(each) is not EosTokenCriteria]
        self._write = _write if compile_with is None else torch.compile(_write, dynamic=False, **compile_with)
        self.criteria = StoppingCriteriaList(others) if others else None
        """Those that need more than the last token, and are evaluated beside the next step; None without any."""

    def signature(self) -> tuple[Any, ...] | None:
        """What a captured tail depends on; two of the same signature do the same. None where it can't be captured.

        Reads a few values of the device.
        """
        if self.criteria is not None or any(type(each) not in OF_SCORES_ALONE for each in self._processors):
            return None
        processors = tuple((type(each), _frozen(vars(each))) for each in self._processors)
        return (processors, self._do_sample, _frozen(self._pad), _frozen(self._ends))

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """int64: the ids of padding and of ends. A captured tail reads them where they are, so they must stay there."""
        return tuple(each for each in (self._pad, self._ends) if each is not None)

    def settle(self, buffers: DecodeBuffers, slot: int, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Choose the tokens of one step and write them, with what follows from them, to the buffers of `slot`.

        Args:
            buffers: of this generation.
            slot: 0 or 1; what the other one holds is of the step before.
            ids: int64 (batch, length), the tokens so far; a captured tail does not look at them.
            logits: float32 (batch, vocabulary).
        """
        self._write(buffers, slot, self._choose(ids, logits), self._pad, self._ends)

    def _choose(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores = self._processors(ids, logits)
        if not self._do_sample:
            return torch.argmax(scores, dim=-1)
        # What `torch.multinomial` does for one sample, and draws for it, without its checks, which read the device.
        chances = torch.softmax(scores, dim=-1)
        return torch.argmax(chances / torch.empty_like(chances).exponential_(1), dim=-1)


def _write(
    buffers: DecodeBuffers, slot: int, tokens: torch.Tensor, pad: torch.Tensor | None, ends: torch.Tensor | None
) -> None:
    """Pad rows that have ended, find those that end now, and append: small operations, made one by a compiler."""
    ended = buffers.finished[1 - slot]
    if pad is not None:
        tokens = torch.where(ended, pad, tokens)
    if ends is not None:
        ended = ended | ends_of(tokens, ends)
    buffers.write(slot, tokens, ended)


def _frozen(value: Any) -> Any:
    """The value as one that can be compared and hashed."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist()))
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    return value
