"""Drafting as one CUDA graph for each of a few batch sizes, captured from the eager drafting function.

Batches of one size in which every request has drafts to verify differ only in the contents of their tensors. So the
launches are captured once, on tensors that keep their addresses, and replayed after these tensors are filled. Padding
rows fill up a smaller batch: their only page is page 0, which holds no request's keys.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

NO_SLOT = -1
"""Slot of a token that the KV cache does not store."""

Drafting = Callable[[Mapping[str, torch.Tensor], int], torch.Tensor]
"""Takes tensors, named as in `DraftInputs.of`, and the number of requests; returns their drafts, (rows, drafts)."""
Replay = Callable[[], torch.Tensor]
Capture = Callable[[Sequence[Callable[[], torch.Tensor]]], Sequence[Replay]]
"""Takes functions that have run before, and returns a replay of each."""


def batch_sizes(most: int) -> list[int]:
    """Powers of two up to `most`, the middles between them except 3, and `most` itself."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted(
        {size for power in powers for size in (power, power + power // 2) if size <= most and size != 3} | {most}
    )


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The largest batch.

    Attributes:
        rows: requests.
        tokens: query tokens of each request: its drafts to verify plus one.
        hidden: width of the target's hidden states, as the drafter gets them.
        pages: columns of the block table.
        dtype: of the hidden states.
        axes: of positions, three for M-RoPE; 0 if a position is one number.
        own: width of the drafter's hidden states if its first pass over the batch has run outside the graph, which then
            has one token of each request; else 0.
    """

    rows: int
    tokens: int
    hidden: int
    pages: int
    dtype: torch.dtype
    axes: int = 0
    own: int = 0


_FIRST_PASS = frozenset({"token_ids", "slot_mapping", "next_token_ids", "last_indices"})
"""Inputs of the first pass only; the rest of drafting depends on no value in them."""


class DraftInputs:
    """The tensors that graphs read. Padding rows have slot `NO_SLOT`, and page 0 as their only page."""

    def __init__(self, shape: DraftShape, device: torch.device) -> None:
        """Allocate the tensors; at first every row is padding."""
        self.shape = shape
        rows, tokens = shape.rows, shape.tokens

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        axes = (shape.axes,) if shape.axes else ()
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
        self._starts = starts
        self._each = {
            "token_ids": zeros(rows * tokens),
            "positions": zeros(*axes, rows * tokens, dtype=torch.int64),
            "hidden_states": zeros(rows * tokens, shape.hidden, dtype=shape.dtype),
            "slot_mapping": zeros(rows * tokens, dtype=torch.int64).fill_(NO_SLOT),
            "next_token_ids": zeros(rows),
            "last_indices": starts[1:] - 1,
            "rejected": zeros(rows),
            "seq_lens": zeros(rows).fill_(tokens),
            "block_table": zeros(rows, shape.pages),
        }
        if shape.own:
            self._each |= {name: zeros(rows, shape.own, dtype=shape.dtype) for name in ("sampled_states", "own_states")}
        self._filled = 0
        """Leading rows that hold requests."""
        self._by_dtype: dict[torch.dtype, list[str]] = {}
        for name, each in self._each.items():
            if not (shape.own and name in _FIRST_PASS):
                self._by_dtype.setdefault(each.dtype, []).append(name)
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    def of(self, rows: int) -> dict[str, torch.Tensor]:
        """Views of the first `rows` rows.

        Returns:
            By token: `token_ids`, `hidden_states` and `slot_mapping`, (rows * tokens, ...), and `positions`,
            (rows * tokens,) or (axes, rows * tokens); by request: `next_token_ids`, `last_indices`, `rejected`,
            `seq_lens`, (rows,), and `block_table`, (rows, pages); and `query_start_loc`, (rows + 1,). With `own`, also
            the drafter's hidden states that the first draft is sampled from, `sampled_states`, and those that its next
            step takes, `own_states`, (rows, own).
        """
        if rows not in self._views:
            counts = {name: rows * (len(each) // self.shape.rows) for name, each in self._each.items()}
            views = {name: each[: counts[name]] for name, each in self._each.items()}
            views["positions"] = self._each["positions"][..., : rows * self.shape.tokens]
            self._views[rows] = views | {"query_start_loc": self._starts[: rows + 1]}
        return self._views[rows]

    def fill(self, rows: int, given: Mapping[str, torch.Tensor]) -> None:
        """Copy in the tensors of a batch of `rows` requests, and reset rows that an earlier batch filled beyond these.

        Args:
            rows: requests.
            given: tensors named as in `of`, without `query_start_loc`, and of the same lengths; with `own`, those of
                the first pass may be missing.
        """
        views = self.of(rows)
        for names in self._by_dtype.values():
            # One launch for all tensors of a dtype.
            torch._foreach_copy_([views[name] for name in names], [given[name] for name in names], non_blocking=True)
        if rows < self._filled:
            tokens = self.shape.tokens
            self._each["slot_mapping"][rows * tokens : self._filled * tokens].fill_(NO_SLOT)
            self._each["seq_lens"][rows : self._filled].fill_(tokens)
            self._each["block_table"][rows : self._filled].zero_()
        self._filled = rows


class DraftGraphs:
    """Captures `drafting` as CUDA graphs and replays them.

    Args:
        drafting: function to capture; kept, with all tensors that it reads and writes. It may change `seq_lens` in
            place, and no other input.
        inputs: the tensors that `drafting` gets.
        sizes: numbers of rows to capture.
        capture: makes the replays, of the largest size first.
    """

    def __init__(
        self,
        drafting: Drafting,
        inputs: DraftInputs,
        sizes: Iterable[int],
        capture: Capture,
    ) -> None:
        self._inputs, self._drafting = inputs, drafting

        def run(rows: int) -> torch.Tensor:
            given = inputs.of(rows)
            # Cloned, because the length of a padding row would grow with each replay.
            return drafting(given | {"seq_lens": given["seq_lens"].clone()}, rows)

        # Largest first: smaller graphs then fit into its memory.
        runs = {size: functools.partial(run, size) for size in sorted(sizes, reverse=True)}
        for each in runs.values():
            each()  # compiles, and lets libraries allocate the memory that they keep
        self._replays = dict(zip(runs, capture([*runs.values()]), strict=True))
        self.sizes = sorted(self._replays)

    def draft(self, rows: int, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The drafts of a batch.

        Args:
            rows: requests, no more than the largest of `sizes`.
            given: as in `DraftInputs.fill`.

        Returns:
            (rows, drafts), a tensor that the caller owns.
        """
        self._inputs.fill(rows, given)
        replay = self._replays[self.sizes[bisect.bisect_left(self.sizes, rows)]]
        return replay()[:rows].clone()
