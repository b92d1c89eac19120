"""How rows are decoded on the device: what a row feeds to the model, and what it writes to its request slot.

A request slot holds what the device remembers of a request between two steps. For `SingleTokens` that is the last
token of the request. The other `Decoding` is `drafting.DraftedTokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm_async_spec.generation.batching.paged_model import PagedModel
from vllm_async_spec.generation.batching.sampling import sample
from vllm_async_spec.generation.batching.step_slots import STOPS, TOKEN, DecodeInputs, PrefillInputs
from vllm_async_spec.generation.end_of_sequence import ends_of
from vllm_async_spec.metadata import CommonAttentionMetadata


class Decoding(Protocol):
    """One way of decoding. A CUDA graph may own the result of `forward`, and overwrites it at each replay."""

    def forward(self, inputs: DecodeInputs, size: int, longest: int) -> Any:
        """Call the model for `size` rows, padding rows included; may be captured. Changes no request slot.

        `longest` is an upper bound of the sequences' lengths, this step's tokens included.
        """
        ...

    def commit(self, found: Any, inputs: DecodeInputs, size: int, sampled: bool, results: torch.Tensor) -> None:
        """Choose tokens, and write them to the request slots and the step's results.

        Args:
            found: what `forward` returned.
            inputs: the rows.
            size: number of rows.
            sampled: whether any row is not greedy.
            results: (size, columns) int64, see `StepSlot.results`.
        """
        ...

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, inputs: PrefillInputs) -> None:
        """Compute what a prompt needs beside the model's own keys and values."""
        ...

    def commit_prefill(
        self, logits: torch.Tensor, inputs: PrefillInputs, rows: int, sampled: bool, results: torch.Tensor
    ) -> None:
        """Choose the first token of each row whose prompt has ended; as `commit`."""
        ...


class SingleTokens:
    """One token a row and step. The host always knows the length of each sequence.

    There are as many request slots as rows at most; padding rows share an extra slot at the end.
    """

    def __init__(self, target: PagedModel, batch: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._target = target
        self._last_tokens = torch.zeros(batch + 1, dtype=torch.int64, device=device)
        """(request slots + 1,) int64: the last token of each request; the last entry is for padding."""
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._starts_cpu = torch.arange(batch + 1, dtype=torch.int32, device="cpu")

    def forward(self, inputs: DecodeInputs, size: int, longest: int) -> torch.Tensor:
        """(size, vocabulary): the model on one token of each row, taken from its request slot. See `Decoding`."""
        metadata = CommonAttentionMetadata(
            query_start_loc=self._starts[: size + 1],
            query_start_loc_cpu=self._starts_cpu[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            max_seq_len=longest,
            block_table_tensor=inputs.block_table[:size],
            slot_mapping=inputs.slot_mapping[:size],
        )
        tokens = self._last_tokens.index_select(0, inputs.request_slots[:size])
        return self._target.decode(metadata, tokens, inputs.positions[:size])

    def commit(
        self, found: torch.Tensor, inputs: DecodeInputs, size: int, sampled: bool, results: torch.Tensor
    ) -> None:
        """See `Decoding`."""
        temperature = inputs.temperature[:size] if sampled else None
        tokens = sample(found, temperature, inputs.seeds[:size], inputs.positions[:size])
        self._leave(tokens, sampled, inputs.request_slots[:size], results)

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, inputs: PrefillInputs) -> None:
        """See `Decoding`; nothing else is needed."""

    def commit_prefill(
        self, logits: torch.Tensor, inputs: PrefillInputs, rows: int, sampled: bool, results: torch.Tensor
    ) -> None:
        """See `Decoding`."""
        temperature = inputs.temperature[:rows] if sampled else None
        tokens = sample(logits, temperature, inputs.seeds[:rows], inputs.seq_lens[:rows] - 1)
        self._leave(tokens, sampled, inputs.request_slots[:rows], results)

    def _leave(self, tokens: torch.Tensor, sampled: bool, request_slots: torch.Tensor, results: torch.Tensor) -> None:
        stops = ends_of(tokens, self._eos)
        # A step may already be planned for a row for which nothing was drawn; it must have a token to feed.
        fed = tokens.clamp(min=0) if sampled else tokens
        # Last, without an allocation: a step that fails leaves all tokens as they were.
        results[:, TOKEN].copy_(tokens)
        results[:, STOPS].copy_(stops)
        self._last_tokens.index_copy_(0, request_slots, fed)
