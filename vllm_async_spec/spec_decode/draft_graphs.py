"""Drafting as one CUDA graph for each of a few batch sizes, captured from the function that drafts kernel by kernel.

A batch in which every request has its drafts to be verified differs from another of as many requests in nothing but the
contents of its tensors. So what is launched for it is recorded once, on tensors that stay where they are, and replayed
when these have been filled. A smaller batch is filled up with rows that are nobody's: their pages are page 0, which
holds no request's keys.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

NO_SLOT = -1
"""Where a token goes that is kept nowhere."""

Drafting = Callable[[Mapping[str, torch.Tensor], int], torch.Tensor]
"""From tensors, by the names of `DraftInputs.of`, of a number of requests to their drafts, (rows, drafts)."""
Replay = Callable[[], torch.Tensor]


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, and between two powers of two their middle, up to `most`, which is one itself."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted(
        {size for power in powers for size in (power, power + power // 2) if size <= most and size != 3} | {most}
    )


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The largest batch.

    Attributes:
        rows: requests.
        tokens: of each request: its drafts to be verified and one.
        hidden: width of the target's hidden states, as the drafter is given them.
        pages: columns of the block table.
        dtype: of hidden states.
    """

    rows: int
    tokens: int
    hidden: int
    pages: int
    dtype: torch.dtype


class DraftInputs:
    """The tensors that graphs read. Rows that no request has filled have no slots, and page 0 alone."""

    def __init__(self, shape: DraftShape, device: torch.device) -> None:
        """Make them, of a batch in which no row is a request's."""
        self.shape = shape
        rows, tokens = shape.rows, shape.tokens

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
        self._starts = starts
        self._each = {
            "token_ids": zeros(rows * tokens),
            "positions": zeros(rows * tokens, dtype=torch.int64),
            "hidden_states": zeros(rows * tokens, shape.hidden, dtype=shape.dtype),
            "slot_mapping": zeros(rows * tokens, dtype=torch.int64).fill_(NO_SLOT),
            "next_token_ids": zeros(rows),
            "last_indices": starts[1:] - 1,
            "rejected": zeros(rows),
            "seq_lens": zeros(rows).fill_(tokens),
            "block_table": zeros(rows, shape.pages),
        }
        self._filled = 0
        """Rows that some request has filled since they were emptied."""
        self._by_dtype: dict[torch.dtype, list[str]] = {}
        for name, each in self._each.items():
            self._by_dtype.setdefault(each.dtype, []).append(name)
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    def of(self, rows: int) -> dict[str, torch.Tensor]:
        """Views of the first `rows` rows.

        Returns:
            Of tokens: `token_ids`, `positions`, `hidden_states` and `slot_mapping`, (rows * tokens, ...); of requests:
            `next_token_ids`, `last_indices`, `rejected`, `seq_lens`, (rows,), and `block_table`, (rows, pages); and
            `query_start_loc`, (rows + 1,).
        """
        if rows not in self._views:
            counts = {name: rows * (len(each) // self.shape.rows) for name, each in self._each.items()}
            views = {name: each[: counts[name]] for name, each in self._each.items()}
            self._views[rows] = views | {"query_start_loc": self._starts[: rows + 1]}
        return self._views[rows]

    def fill(self, rows: int, given: Mapping[str, torch.Tensor]) -> None:
        """Take over the tensors of a batch of `rows` requests; rows beyond that another batch had filled are emptied.

        Args:
            rows: requests.
            given: by the names of `of`, without `query_start_loc`; each as long as there.
        """
        views = self.of(rows)
        for names in self._by_dtype.values():
            # One launch for tensors of one type.
            torch._foreach_copy_([views[name] for name in names], [given[name] for name in names], non_blocking=True)
        if rows < self._filled:
            tokens = self.shape.tokens
            self._each["slot_mapping"][rows * tokens : self._filled * tokens].fill_(NO_SLOT)
            self._each["seq_lens"][rows : self._filled].fill_(tokens)
            self._each["block_table"][rows : self._filled].zero_()
        self._filled = rows


class DraftGraphs:
    """Replays what `drafting` launches.

    Args:
        drafting: what is captured; kept, with all the tensors that it reads and writes. It may change `seq_lens` in
            place, and nothing else that it is given.
        inputs: the tensors that it is given.
        sizes: numbers of rows that are captured.
        capture: makes a replay of a function; `captured`, but for tests.
    """

    def __init__(
        self,
        drafting: Drafting,
        inputs: DraftInputs,
        sizes: Iterable[int],
        capture: Callable[[Callable[[], torch.Tensor]], Replay],
    ) -> None:
        self._inputs, self._drafting = inputs, drafting

        def run(rows: int) -> torch.Tensor:
            given = inputs.of(rows)
            # A row that is nobody's would grow with each replay.
            return drafting(given | {"seq_lens": given["seq_lens"].clone()}, rows)

        self._replays: dict[int, Replay] = {}
        for size in sorted(sizes, reverse=True):  # so that the smaller ones fit into the memory of the largest
            run(size)  # compiles, and lets libraries take the memory that they keep
            self._replays[size] = capture(lambda size=size: run(size))  # type: ignore[misc]
        self.sizes = sorted(self._replays)

    def draft(self, rows: int, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The drafts of a batch.

        Args:
            rows: requests, no more than the largest of `sizes`.
            given: as of `DraftInputs.fill`.

        Returns:
            (rows, drafts), and the caller's own.
        """
        self._inputs.fill(rows, given)
        replay = self._replays[self.sizes[bisect.bisect_left(self.sizes, rows)]]
        return replay()[:rows].clone()
