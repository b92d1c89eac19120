"""What it takes to attend over one of the suite's batches, and what attention over it is.

A `Layer` is one attention layer with a KV cache of its own. Slots that hold no token of a batch, which in an engine are
free or hold what was rejected, are full of `POISON`, so that attending past the end of a request is seen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_async_spec.attention.reference import ReferenceArguments, paged_attention
from vllm_async_spec.compat.cases import BLOCK_SIZE, NUM_BLOCKS, Case
from vllm_async_spec.compat.device import Device

__all__ = ["NOTHING_COMPILED", "POISON", "Batch", "Layer", "NoForwardError", "blocks_of", "random", "reference"]

POISON = 1000.0
"""A number, because kernels multiply what they mask by 0; and far from any key or value of a batch."""

NOTHING_COMPILED = "nothing is compiled of a release that is only unpacked"
"""Why no layer of an unpacked release attends."""


class NoForwardError(RuntimeError):
    """Nothing can be attended here; the message says why in one sentence, without what it is said of."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A case, as a layer wants it. Tensors are on the device; T is the number of tokens of all sequences together.

    Attributes:
        case: The case.
        block_size: Tokens in a block of the KV cache.
        query_start_loc: (rows + 1,) int32.
        seq_lens: (rows,) int32, exact.
        block_table: (rows, blocks) int32.
        slot_mapping: (query tokens, padding included,) int64; -1 for padding.
        slots: (T,) int64: where each token's keys lie.
        content: (T,) int64: which token's keys it has; its own number, but in a prefix that all requests share.
        context: (tokens computed before,) int64: those among all.
        new: (query tokens without padding,) int64: the query tokens among all.
        positions: (query tokens without padding,) int64: where each stands in its sequence.
    """

    case: Case
    block_size: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    slots: torch.Tensor
    content: torch.Tensor
    context: torch.Tensor
    new: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, case: Case, device: Device, *, block_size: int = BLOCK_SIZE, common_prefix: int = 0) -> Batch:
        """The batch of a case.

        Args:
            case: The case.
            device: Where its tensors belong.
            block_size: Tokens in a block of the KV cache.
            common_prefix: Tokens at the start of all requests that are the same.
        """
        fields = case.fields(block_size=block_size)
        blocks = fields["block_table_tensor"].long()
        at = [torch.arange(length) for length in case.seq_lens]
        slots = [row[p // block_size] * block_size + p % block_size for row, p in zip(blocks, at, strict=True)]
        position = torch.cat(at)
        number = torch.arange(len(position))
        content = torch.where(position < common_prefix, position, number)
        new = torch.cat([p >= len(p) - query for p, query in zip(at, case.query_lens, strict=True)])
        return cls(
            case,
            block_size,
            query_start_loc=device.place(fields["query_start_loc"]),
            seq_lens=device.place(fields["seq_lens"]),
            block_table=device.place(fields["block_table_tensor"]),
            slot_mapping=device.place(fields["slot_mapping"]),
            slots=device.place(torch.cat(slots)),
            content=device.place(content),
            context=device.place(number[~new]),
            new=device.place(number[new]),
            positions=device.place(position[new]),
        )

    @property
    def tokens(self) -> int:
        """Query tokens, padding included."""
        return self.slot_mapping.shape[0]

    def queries(self, of_all: torch.Tensor) -> torch.Tensor:
        """(T, ...) to (query tokens, padding included, ...): what is of the query tokens; zeros for padding."""
        padded = of_all.new_zeros(self.tokens, *of_all.shape[1:])
        padded[: len(self.new)] = of_all[self.new]
        return padded


class Layer(Protocol):
    """One attention layer."""

    def fill(self, batch: Batch) -> None:
        """Take a batch: write the keys of its contexts, by the layer's own write path."""

    def attend(self, metadata: Any) -> torch.Tensor:
        """The layer's part of a step: write the keys of the query tokens, and attend.

        Args:
            metadata: What a builder built of the batch.

        Returns:
            (compared tokens, query heads, head size): the output, without padding.
        """

    def expected(self) -> torch.Tensor:
        """What `attend` should have returned, float32; made from the batch alone, without any metadata."""


def blocks_of(block_size: int) -> int:
    """Blocks of a layer's KV cache: as many tokens as `NUM_BLOCKS` blocks of the usual size hold."""
    return NUM_BLOCKS * BLOCK_SIZE // block_size


def random(device: Device, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed numbers on the device, the same every time.

    Args:
        device: Where they belong.
        seed: Of their generator.
        *shape: Of the result.
        dtype: Of the result.
    """
    return device.place(_random(seed, shape).to(dtype, copy=True))


@functools.lru_cache(maxsize=8)
def _random(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(
    batch: Batch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    chunk: int | None = None,
) -> torch.Tensor:
    """Attention over a batch in float32, by `attention.reference.paged_attention`.

    Args:
        batch: The batch.
        query: (query tokens, padding included, query heads, head size).
        keys: (T, KV heads, head size).
        values: (T, KV heads, head size).
        scale: Factor on the logits.
        causal: Whether a token sees none after it.
        chunk: As chunked local attention has it: a token sees those of its own chunk of so many; a multiple of the
            block size. None if it sees all.

    Returns:
        (query tokens without padding, query heads, head size) float32.
    """
    blocks = int(batch.block_table.max()) + 1

    def paged(of_tokens: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(blocks * batch.block_size, *of_tokens.shape[1:], device=of_tokens.device)
        cache[batch.slots] = of_tokens.float()
        return cache.view(blocks, batch.block_size, *of_tokens.shape[1:])

    lengths, table, starts = batch.seq_lens, batch.block_table, batch.query_start_loc
    longest = max(batch.case.query_lens)
    real = len(batch.new)
    if chunk is not None:
        # Each query token is a request of its own, which begins where its chunk does.
        first = batch.positions // chunk * chunk
        row = torch.searchsorted(starts[1:].contiguous(), torch.arange(real, device=starts.device), right=True)
        column = first[:, None] // batch.block_size + torch.arange(chunk // batch.block_size, device=starts.device)
        table = table[row[:, None], column.clamp(max=table.shape[1] - 1)]
        lengths = (batch.positions - first + 1).int()
        starts, longest = torch.arange(real + 1, dtype=torch.int32, device=starts.device), 1
    arguments = ReferenceArguments(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        max_query_len=longest,
        max_seq_len=chunk or max(batch.case.seq_lens),
        causal=causal,
    )
    return paged_attention(query[:real].float(), paged(keys), paged(values), arguments, scale=scale)
