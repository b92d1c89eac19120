"""Speculative decoding: a small model drafts, the large one verifies, and neither waits for the host.

For each row, a step calls the drafter K times. Then it calls the target once, on the last token and the K drafts. The
target's choice at a position is kept if all drafts before that position equal the target's choices. That keeps at least
one choice and at most K + 1 (greedy verification: Leviathan, Kalman and Matias, ICML 2023, at temperature 0). So the
tokens are the target's, and the drafter decides only how many there are. The count stays on the device; the next step
computes positions, lengths and slots from the count.

The first call of the drafter takes the last two tokens, because after K accepted drafts it has not seen the last draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_async_spec.generation.batching.paged_model import PagedModel
from vllm_async_spec.generation.batching.step_slots import COUNT, STOPS, TOKEN, DecodeInputs, PrefillInputs
from vllm_async_spec.generation.end_of_sequence import ends_of
from vllm_async_spec.metadata import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class Drafted:
    """Results of a step's forward, before tokens are chosen."""

    start: torch.Tensor
    """(rows,) int64: position of the last token."""
    fed: torch.Tensor
    """(rows, K + 1) int64: the last token, then the drafts."""
    logits: torch.Tensor
    """(rows * (K + 1), vocabulary): the target's, after each token of `fed`."""


class DraftedTokens:
    """K drafts a row and step; a `Decoding`.

    The drafter's cache uses the same pages. There are as many request slots as rows at most; padding rows share an
    extra slot at the end. A sequence has at most `max_length` tokens.
    """

    def __init__(
        self,
        target: PagedModel,
        drafter: PagedModel,
        *,
        drafts: int,
        batch: int,
        max_length: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._drafts = drafts
        self._last_position = max_length - 1
        self._computed = torch.zeros(batch + 1, dtype=torch.int64, device=device)
        """(request slots + 1,) int64: exact position of each request's last token; the tokens before are computed."""
        self._recent = torch.zeros(batch + 1, 2, dtype=torch.int64, device=device)
        """(request slots + 1, 2) int64: the second-last and the last token of each request."""
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
        self._offsets = torch.arange(-1, drafts + 1, device=device)
        self._seconds = torch.arange(batch, device=device) * 2 + 1
        widths = {1, 2, drafts + 1}
        self._starts_cpu = {width: torch.arange(batch + 1, dtype=torch.int32, device="cpu") * width for width in widths}
        self._starts = {width: starts.to(device) for width, starts in self._starts_cpu.items()}

    def forward(self, inputs: DecodeInputs, size: int, longest: int) -> Drafted:
        """Draft, and compute the target's logits for verification. See `Decoding`."""
        request_slots, table = inputs.request_slots[:size], inputs.block_table[:size]
        # The host may not know yet that a request has ended; the host's bound keeps the request within its pages. A
        # sequence has at least two tokens, so padding gets a second token.
        start = torch.minimum(self._computed.index_select(0, request_slots), inputs.positions[:size]).clamp(min=1)
        at = start[:, None] + self._offsets
        recent = self._recent.index_select(0, request_slots)
        token = self._call(self._drafter, recent, at[:, :2], table, longest, self._seconds[:size]).argmax(-1)
        fed = [recent[:, 1], token]
        for step in range(1, self._drafts):
            here = at[:, step + 1 : step + 2]
            token = self._call(self._drafter, token[:, None], here, table, longest).argmax(-1)
            fed.append(token)
        tokens = torch.stack(fed, dim=1)
        return Drafted(start, tokens, self._call(self._target, tokens, at[:, 1:], table, longest))

    def commit(self, found: Drafted, inputs: DecodeInputs, size: int, sampled: bool, results: torch.Tensor) -> None:
        """Verify the drafts. See `Decoding`; no row is sampled."""
        chosen = found.logits.argmax(-1).view(size, -1)
        agrees = chosen[:, :-1] == found.fed[:, 1:]
        accepted = agrees.long().cumprod(1).sum(1, keepdim=True)
        stops = ends_of(chosen, self._eos) & (self._offsets[1:] <= accepted)
        # Tokens after an end of sequence are dropped.
        behind = stops.long().cumsum(1) - stops.long() > 0
        count = (~behind & (self._offsets[1:] <= accepted)).sum(1)
        ended = stops.any(1)
        computed = found.start + accepted[:, 0] + 1
        recent = torch.cat([found.fed.gather(1, accepted), chosen.gather(1, accepted)], dim=1)
        # Last, without an allocation: a step that fails leaves all request slots as they were.
        results[:, STOPS].copy_(ended)
        results[:, COUNT].copy_(count)
        results[:, TOKEN:].copy_(chosen)
        request_slots = inputs.request_slots[:size]
        self._computed.index_copy_(0, request_slots, computed)
        self._recent.index_copy_(0, request_slots, recent)

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, inputs: PrefillInputs) -> None:
        """Run the drafter on the prompts too. See `Decoding`."""
        self._drafter.prefill(metadata, host, inputs)

    def commit_prefill(
        self, logits: torch.Tensor, inputs: PrefillInputs, rows: int, sampled: bool, results: torch.Tensor
    ) -> None:
        """See `Decoding`; no row is sampled."""
        chosen = logits.argmax(-1)
        stops = ends_of(chosen, self._eos)
        recent = torch.stack([inputs.tokens.index_select(0, inputs.last[:rows]), chosen], dim=1)
        computed = inputs.seq_lens[:rows].long()
        results[:, STOPS].copy_(stops)
        results[:, TOKEN].copy_(chosen)
        request_slots = inputs.request_slots[:rows]
        self._computed.index_copy_(0, request_slots, computed)
        self._recent.index_copy_(0, request_slots, recent)

    def _call(
        self,
        model: PagedModel,
        tokens: torch.Tensor,
        at: torch.Tensor,
        table: torch.Tensor,
        longest: int,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of `tokens`, the last of each sequence; `tokens` and their positions `at` are (rows, width) int64."""
        size, width = tokens.shape
        page_size = model.cache.page_size
        slots = table.gather(1, at // page_size).long() * page_size + at % page_size
        metadata = CommonAttentionMetadata(
            query_start_loc=self._starts[width][: size + 1],
            query_start_loc_cpu=self._starts_cpu[width][: size + 1],
            seq_lens=(at[:, -1] + 1).int(),
            num_reqs=size,
            num_actual_tokens=size * width,
            max_query_len=width,
            max_seq_len=longest,
            block_table_tensor=table,
            slot_mapping=slots.flatten(),
        )
        # A draft may lie past the model's last position. Its results are dropped.
        positions = at.clamp(max=self._last_position).flatten()
        return model.decode(metadata, tokens.flatten(), positions, wanted)
