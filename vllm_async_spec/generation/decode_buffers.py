"""The device tensors of one generation, each allocated once: buffers between steps, and the static cache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """The tensors through which the steps of a generation pass data.

    Steps alternate between two slots. A step of slot s reads slot 1 - s and writes slot s, so the previous step's
    output stays readable while it runs. Tensors without slots are written by each step in turn.
    """

    sequences: torch.Tensor
    """int64 (batch, longest): prompts and tokens so far; each column is written once."""
    length: torch.Tensor
    """int64 (1,): number of columns written."""
    tokens: tuple[torch.Tensor, torch.Tensor]
    """int64 (batch, 1) for each slot: the tokens of its step."""
    finished: tuple[torch.Tensor, torch.Tensor]
    """bool (batch,) for each slot: rows that have stopped at its step or before."""
    undrawn: tuple[torch.Tensor, torch.Tensor]
    """bool (1,) for each slot: whether no token could be drawn at its step or before."""
    positions: torch.Tensor
    """int64 (..., 1): position ids of the step's input, in the shape that the model takes."""
    mask: torch.Tensor
    """int64 (batch, columns): 0 for padding of the prompt, 1 elsewhere, also for tokens to come."""

    @classmethod
    def allocate(
        cls, batch: int, longest: int, columns: int, positions: tuple[int, ...], device: torch.device
    ) -> DecodeBuffers:
        """Allocate the buffers of sequences of at most `longest` tokens.

        The mask has a column for each token that the cache has room for. `positions` is the shape of the position ids.
        """

        def ids(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        def flags(number: int) -> torch.Tensor:
            return torch.zeros(number, dtype=torch.bool, device=device)

        return cls(
            sequences=ids(batch, longest),
            length=ids(1),
            tokens=(ids(batch, 1), ids(batch, 1)),
            finished=(flags(batch), flags(batch)),
            undrawn=(flags(1), flags(1)),
            positions=ids(*positions),
            mask=torch.ones((batch, columns), dtype=torch.long, device=device),
        )

    def begin(self, prompts: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        """Start a generation.

        Args:
            prompts: int64 (batch, length).
            mask: int64 (batch, length), 0 for padding; None without a mask.
            positions: int64 (..., 1), of the first generated token; None if the model takes none.
        """
        length = prompts.shape[1]
        self.sequences[:, :length].copy_(prompts)
        self.length.fill_(length)
        self.mask.fill_(1)
        if mask is not None:
            self.mask[:, :length].copy_(mask)
        if positions is not None:
            # `write` adds 1 when it appends the first token.
            self.positions.copy_(positions - 1)
        for flags in (*self.finished, *self.undrawn):
            flags.zero_()

    def rewind(self) -> None:
        """Reset to sequences of one token, for warm-up and capture runs whose tokens don't count."""
        self.length.fill_(1)
        self.positions.zero_()

    def write(self, slot: int, tokens: torch.Tensor, finished: torch.Tensor) -> None:
        """Append the tokens of one step, int64 (batch,), with the rows that have stopped, bool (batch,)."""
        column = tokens[:, None]
        self.tokens[slot].copy_(column)
        self.finished[slot].copy_(finished)
        self.sequences.index_copy_(1, self.length, column)
        self.length.add_(1)
        self.positions.add_(1)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        held = [getattr(self, field.name) for field in fields(self)]
        return sum(each.nbytes for one in held for each in (one if isinstance(one, tuple) else (one,)))


def full_static_cache(model: Any, tokens: int) -> StaticCache:
    """A transformers cache for `tokens` tokens a row, whose steps can be captured.

    transformers' own static layer for a sliding window counts the length on the host, and decides there what a step
    does. A captured step would repeat one decision for ever. So here such a layer keeps all tokens, and the mask alone
    makes the window. This costs memory for tokens that have left the window. `layer_beside_keys_and_values` must name
    no layer of the model.
    """
    cache = _static_cache(model, tokens)
    cache.layers = [StaticLayer(max_cache_len=tokens) for _ in cache.layers]
    return cache


def layer_beside_keys_and_values(model: Any) -> str | None:
    """The class of a layer in the static cache that keeps more, such as a recurrent state; None if there is none."""
    kinds = (type(layer) for layer in _static_cache(model, 1).layers)
    return next((kind.__name__ for kind in kinds if kind not in (StaticLayer, StaticSlidingWindowLayer)), None)


def _static_cache(model: Any, tokens: int) -> StaticCache:
    # transformers allocates nothing until the first step.
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that the cache has allocated."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
