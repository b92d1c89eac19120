"""The batches that a metadata builder is tried with, and what the host may know of their lengths.

A case is plain integers. `Case.fields` makes the tensors of it; `release_metadata` and `our_metadata` put them into
the loaded vLLM's `CommonAttentionMetadata`, or into ours where there is no vLLM.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.compat import builders
from vllm_async_spec.host_copy import Epoch
from vllm_async_spec.metadata import CommonAttentionMetadata

__all__ = [
    "BLOCK_SIZE",
    "CASES",
    "DRAFT_TOKENS",
    "MAX_MODEL_LEN",
    "NUM_BLOCKS",
    "Call",
    "Case",
    "Host",
    "MetadataFactory",
    "our_metadata",
    "release_metadata",
]

DRAFT_TOKENS = 3
"""K: draft tokens of a step."""
BLOCK_SIZE = 16
"""Tokens in a block of the KV cache, where the backend does not ask for another size."""
MAX_MODEL_LEN = 8192
NUM_BLOCKS = 8192
"""Of the KV cache: no batch has more."""


class Host(enum.Enum):
    """What the host is told of the lengths: `seq_lens_cpu`, and `seq_lens_cpu_upper_bound` where there is one.

    The device's lengths are exact in all of them.
    """

    EXACT = "exact lengths"
    """Both are exact, as without speculative decoding."""
    ABSENT = "no lengths"
    """Neither is there."""
    BOUND = "upper bound"
    """Only the bound: exact for prefills, too long by the drafts in flight elsewhere. Where there is no field for it,
    it takes the place of the lengths."""
    STALE = "garbage beside the upper bound"
    """As `BOUND`, and the lengths are garbage: for a builder that claims to read the bound only."""
    GARBAGE_DECODES = "garbage for decodes"
    """Both are exact for prefills, and garbage elsewhere."""
    GARBAGE = "garbage"
    """Both are garbage, but that padding is empty."""


class Call(enum.Enum):
    """Which of the builder's methods makes the metadata."""

    BUILD = "build"
    DRAFTING = "build_for_drafting"
    CAPTURE = "build_for_cudagraph_capture"


@dataclass(frozen=True, slots=True)
class Case:
    """One batch, as vLLM's runner would make it: decodes first, padding last.

    Attributes:
        name: What the tables call it.
        query_lens: Query tokens of each row; 0 is padding.
        seq_lens: Length of each row including them; 0 is padding.
        prefills: How many of the rows, the last before padding, are still in their prompt.
        call: The method that builds it.
        draft_index: For `Call.DRAFTING`.
        token_padding: Query tokens after those of the last row, as a CUDA graph has them.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    prefills: int = 0
    call: Call = Call.BUILD
    draft_index: int = 0
    token_padding: int = 0

    @property
    def rows(self) -> int:
        """Requests, padding included."""
        return len(self.query_lens)

    @property
    def live(self) -> int:
        """Requests without padding."""
        return sum(length > 0 for length in self.seq_lens)

    @property
    def prefilling(self) -> tuple[bool, ...]:
        """Whether each row is still in its prompt."""
        first = self.live - self.prefills
        return tuple(first <= row < self.live for row in range(self.rows))

    def lengths(self, host: Host) -> tuple[int, ...]:
        """What `host` has for lengths where it has any: exact, a bound, or garbage by row; padding is always 0."""
        return tuple(
            _told(host, row, query, exact, prefilling)
            for row, (query, exact, prefilling) in enumerate(
                zip(self.query_lens, self.seq_lens, self.prefilling, strict=True)
            )
        )

    def fields(self, *, block_size: int = BLOCK_SIZE) -> dict[str, Any]:
        """The fields that are the same whatever the host knows, by the names of `CommonAttentionMetadata`.

        Args:
            block_size: Tokens in a block of the KV cache.

        Returns:
            int32 tensors, `slot_mapping` int64 and `is_prefilling` bool, all of their own memory. Blocks are numbered
            from 1 up to less than `NUM_BLOCKS`, and no two rows share one; beyond its bound a row of the table is 0.
        """
        starts = torch.zeros(self.rows + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(self.query_lens, dtype=torch.int32).cumsum(0)
        width = -(-MAX_MODEL_LEN // block_size)
        blocks = torch.zeros(self.rows, width, dtype=torch.int32)
        first = 1
        for row, bound in zip(blocks, self.lengths(Host.BOUND), strict=True):
            count = -(-bound // block_size)
            row[:count] = torch.arange(first, first + count)
            first += count
        slots = [
            row[at // block_size] * block_size + at % block_size
            for row, query, end in zip(blocks, self.query_lens, self.seq_lens, strict=True)
            for at in (torch.arange(end - query, end),)
        ]
        tokens = sum(self.query_lens) + self.token_padding
        return {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32),
            "num_reqs": self.rows,
            "num_actual_tokens": tokens,
            "max_query_len": max(self.query_lens),
            "block_table_tensor": blocks,
            "slot_mapping": torch.nn.functional.pad(torch.cat(slots).long(), (0, self.token_padding), value=-1),
            "is_prefilling": torch.tensor(self.prefilling),
        }


def _told(host: Host, row: int, query: int, exact: int, prefilling: bool) -> int:
    if exact == 0 or host in (Host.EXACT, Host.ABSENT):
        return exact
    if host in (Host.BOUND, Host.STALE):
        return exact if prefilling else min(exact + DRAFT_TOKENS, MAX_MODEL_LEN)
    if host is Host.GARBAGE_DECODES and prefilling:
        return exact
    # Within the block table, so that what goes wrong is the result and not the memory; too long and too short in turn.
    garbage = min(3 * exact + 17 * (row + 1), MAX_MODEL_LEN) if row % 2 == 0 else max(query, exact // 3)
    return garbage if garbage != exact else exact + 1


def _alike(count: int, query: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of `query` tokens and of lengths that are all different."""
    return (query,) * count, tuple(query + 29 + 37 * row % 400 for row in range(count))


def _after(draft_index: int) -> tuple[int, ...]:
    return tuple(length + draft_index for length in (33, 100, 17, 64))


CASES: tuple[Case, ...] = (
    Case("decode", *_alike(4, 1)),
    Case("spec K + 1", *_alike(4, 1 + DRAFT_TOKENS)),
    Case("non-uniform spec", (4, 2, 3, 2), (33, 17, 50, 101)),
    Case("prefill", (24, 40, 7), (24, 40, 7), prefills=3),
    Case("prefill with context", (24, 40, 7), (57, 140, 23), prefills=3),
    Case("mixed", (4, 4, 9, 40), (33, 17, 30, 40), prefills=2),
    Case("long", (4, 4), (8100, 6001)),
    Case("page boundary", (4, 4, 4, 4), (16, 17, 15, 32)),
    # A CUDA graph pads both; a batch that is padded for data parallelism has rows without tokens.
    Case("padded rows", (4, 4, 0), (33, 17, 0), token_padding=4),
    Case("empty rows", (1, 1, 0, 0), (33, 17, 0, 0)),
    Case("one request", (4,), (33,)),
    Case("256 requests", *_alike(256, 1 + DRAFT_TOKENS)),
    *(
        Case(f"draft step {index + 1}", (1,) * 4, _after(index), call=Call.DRAFTING, draft_index=index)
        for index in range(1, DRAFT_TOKENS)
    ),
    # Four requests of four tokens, cut after the sixth: the second request is in both halves.
    Case("micro-batch, first half", (4, 2), (33, 98)),
    Case("micro-batch, second half", (2, 4, 4), (100, 17, 64)),
    Case("capture, one token", *_alike(8, 1), call=Call.CAPTURE),
    Case("capture, K + 1", *_alike(8, 1 + DRAFT_TOKENS), call=Call.CAPTURE),
)
"""All batches, in the order of the tables."""


_ON_DEVICE = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")


@dataclass(frozen=True, slots=True)
class MetadataFactory:
    """Makes the common metadata of a case.

    Attributes:
        has_lengths: Whether the class has a field for exact host lengths.
        has_bound: Whether it has one for the upper bound.
        make: From all fields by name; host lengths and the bound are None where the host has none.
    """

    has_lengths: bool
    has_bound: bool
    make: Callable[[dict[str, Any]], Any]

    @property
    def hosts(self) -> tuple[Host, ...]:
        """What the host may be told with these fields; the first is what everything is compared with."""
        return tuple(host for host in Host if host is not Host.STALE or (self.has_lengths and self.has_bound))

    @property
    def realistic(self) -> Host:
        """What an engine with asynchronous speculative decoding can tell without waiting."""
        return Host.BOUND if self.has_bound else Host.ABSENT

    def __call__(
        self,
        case: Case,
        host: Host,
        *,
        block_size: int = BLOCK_SIZE,
        place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        **extra: Any,
    ) -> Any:
        """The metadata of `case`.

        Args:
            case: The batch.
            host: What the host is told.
            block_size: Tokens in a block of the KV cache.
            place: Puts a tensor into device memory.
            **extra: Further fields, or other values for those above.

        Returns:
            The metadata. `max_seq_len` is the bound's under `BOUND` and `STALE`, else exact.
        """
        told = torch.tensor(case.lengths(host), dtype=torch.int32)
        bound = torch.tensor(case.lengths(Host.BOUND), dtype=torch.int32) if host is Host.STALE else told
        garbage = torch.tensor(case.lengths(Host.GARBAGE), dtype=torch.int32) if host is Host.STALE else told
        bounded = host in (Host.BOUND, Host.STALE)
        lengths = None if host is Host.ABSENT or (host is Host.BOUND and self.has_bound) else garbage.clone()
        fields = case.fields(block_size=block_size)
        query = fields["query_start_loc_cpu"].diff()
        host_fields = {
            "lengths": lengths,
            "computed": None if lengths is None else lengths - query,
            "bound": None if host is Host.ABSENT else bound.clone(),
        }
        fields |= {name: place(fields[name]) for name in _ON_DEVICE}
        longest = int(bound.max()) if bounded else max(case.seq_lens)
        return self.make(fields | {"max_seq_len": longest} | host_fields | extra)


def release_metadata() -> MetadataFactory:
    """For the loaded vLLM's own class, whichever of the fields it has.

    Raises:
        ImportError: There is no vLLM, or it has no such class.
    """
    cls = builders.common_metadata_class()
    known = {field.name for field in dataclasses.fields(cls)}
    names = {
        "lengths": known & {"seq_lens_cpu", "_seq_lens_cpu"},
        "computed": known & {"num_computed_tokens_cpu", "_num_computed_tokens_cpu"},
        "bound": known & {"seq_lens_cpu_upper_bound"},
    }

    def make(fields: dict[str, Any]) -> Any:
        named = {name: value for name, value in fields.items() if name in known}
        return cls(**named | {name: fields[what] for what, theirs in names.items() for name in theirs})

    return MetadataFactory(bool(names["lengths"]), bool(names["bound"]), make)


def our_metadata() -> MetadataFactory:
    """For `vllm_async_spec.CommonAttentionMetadata`."""

    def make(fields: dict[str, Any]) -> CommonAttentionMetadata:
        ours = {name: fields[name] for name in fields if name not in ("lengths", "computed", "bound")}
        # With an epoch, which no builder may advance: without one no host lengths could be given.
        told = {"_seq_lens_cpu": fields["lengths"], "seq_lens_cpu_upper_bound": fields["bound"]}
        return CommonAttentionMetadata(**ours, **told, epoch=Epoch())

    return MetadataFactory(True, True, make)
