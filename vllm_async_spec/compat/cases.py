"""The batches that the suite tries on a metadata builder, and what the host may know of their lengths.

A case holds plain integers; `Case.fields` makes its tensors. `release_metadata` puts them into the loaded vLLM's
`CommonAttentionMetadata`, and `our_metadata` into this package's class.
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

DRAFT_TOKENS = 3
"""K: draft tokens per step."""
BLOCK_SIZE = 16
"""Tokens in a block of the KV cache, unless the backend needs another size."""
MAX_MODEL_LEN = 8192
NUM_BLOCKS = 8192
"""Blocks in the KV cache; no batch has more."""


class Host(enum.Enum):
    """What the host is told: `seq_lens_cpu`, and `seq_lens_cpu_upper_bound` where the release has that field.

    The device's lengths are always exact.
    """

    EXACT = "exact lengths"
    """Both fields are exact, as without speculative decoding."""
    ABSENT = "no lengths"
    """Both fields are None."""
    BOUND = "upper bound"
    """Only the bound: exact for prefills, too long by the drafts in flight for decodes. Without a bound field,
    `seq_lens_cpu` holds the bound."""
    STALE = "garbage beside the upper bound"
    """As `BOUND`, with garbage in `seq_lens_cpu`: for a builder that claims to read only the bound."""
    GARBAGE_DECODES = "garbage for decodes"
    """Both fields are exact for prefills and garbage for decodes."""
    GARBAGE = "garbage"
    """Both fields are garbage, except that padding rows are 0."""


class Call(enum.Enum):
    """Which of the builder's methods makes the metadata."""

    BUILD = "build"
    DRAFTING = "build_for_drafting"
    CAPTURE = "build_for_cudagraph_capture"
    UPDATE = "update_draft_decode_metadata"
    """`build` for the draft step before, and then an update of what it made; vLLM 0.28 and later."""


@dataclass(frozen=True, slots=True)
class Case:
    """One batch, as vLLM's runner would make it: decodes first, padding last.

    Attributes:
        name: What the tables call it.
        query_lens: Query tokens of each row; 0 is padding.
        seq_lens: Length of each row including them; 0 is padding.
        prefills: Number of rows still in their prompt: the last ones before padding.
        call: The method that builds it.
        draft_index: Argument of `build_for_drafting`, for `Call.DRAFTING`.
        token_padding: Padding query tokens after the last row, as in a full CUDA graph.
        input_padding: Padding tokens of the layer's input that no metadata counts, as in a piecewise CUDA graph.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    prefills: int = 0
    call: Call = Call.BUILD
    draft_index: int = 0
    token_padding: int = 0
    input_padding: int = 0

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

    @property
    def padded(self) -> bool:
        """Whether it has padding rows or tokens, as vLLM makes them for a full CUDA graph."""
        return self.live < self.rows or self.token_padding > 0

    def a_step_before(self) -> Case:
        """The same requests one draft step earlier, each a token shorter."""
        return dataclasses.replace(self, seq_lens=tuple(max(length - 1, 0) for length in self.seq_lens))

    def without_padded_rows(self) -> Case:
        """The batch as vLLM gives it to a builder without full CUDA graphs: only the layer's input is padded."""
        return dataclasses.replace(
            self,
            query_lens=self.query_lens[: self.live],
            seq_lens=self.seq_lens[: self.live],
            token_padding=0,
            input_padding=self.token_padding + self.input_padding,
        )

    def ordered(self, threshold: int) -> Case:
        """The batch in vLLM's order for a `reorder_batch_threshold`: rows with no more query tokens come first."""
        order = sorted(range(self.live), key=lambda row: self.query_lens[row] > threshold)
        order += range(self.live, self.rows)
        return dataclasses.replace(
            self,
            query_lens=tuple(self.query_lens[row] for row in order),
            seq_lens=tuple(self.seq_lens[row] for row in order),
        )

    def lengths(self, host: Host) -> tuple[int, ...]:
        """Lengths of all rows as the host knows them: exact, a bound, or garbage; padding rows are always 0."""
        return tuple(
            _told(host, row, query, exact, prefilling)
            for row, (query, exact, prefilling) in enumerate(
                zip(self.query_lens, self.seq_lens, self.prefilling, strict=True)
            )
        )

    def fields(self, *, block_size: int = BLOCK_SIZE) -> dict[str, Any]:
        """The `CommonAttentionMetadata` fields that do not depend on what the host knows, by name.

        Tensors are int32, but `slot_mapping` is int64 and `is_prefilling` bool; none share memory. Block numbers start
        at 1 and stay below `NUM_BLOCKS`. Rows share no block; after its bound a row of the table is 0.
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
        padding = self.token_padding + self.input_padding
        return {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32),
            "num_reqs": self.rows,
            "num_actual_tokens": tokens,
            "max_query_len": max(self.query_lens),
            "block_table_tensor": blocks,
            "slot_mapping": torch.nn.functional.pad(torch.cat(slots).long(), (0, padding), value=-1),
            "is_prefilling": torch.tensor(self.prefilling),
        }


def _told(host: Host, row: int, query: int, exact: int, prefilling: bool) -> int:
    if exact == 0 or host in (Host.EXACT, Host.ABSENT):
        return exact
    if host in (Host.BOUND, Host.STALE):
        return exact if prefilling else min(exact + DRAFT_TOKENS, MAX_MODEL_LEN)
    if host is Host.GARBAGE_DECODES and prefilling:
        return exact
    # Too long and too short in turn; within the block table, so that kernels give wrong results but no memory faults.
    garbage = min(3 * exact + 17 * (row + 1), MAX_MODEL_LEN) if row % 2 == 0 else max(query, exact // 3)
    return garbage if garbage != exact else exact + 1


def _alike(count: int, query: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query lengths and sequence lengths of `count` rows of `query` tokens each; all sequence lengths differ."""
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
    # A full CUDA graph pads rows, and the tokens of those rows.
    Case("padded rows", (4, 4, 0), (33, 17, 0), token_padding=4),
    Case("empty rows", (1, 1, 0, 0), (33, 17, 0, 0), token_padding=2),
    Case("one request", (4,), (33,)),
    Case("256 requests", *_alike(256, 1 + DRAFT_TOKENS)),
    *(
        Case(f"draft step {index + 1}", (1,) * 4, _after(index), call=Call.DRAFTING, draft_index=index)
        for index in range(1, DRAFT_TOKENS)
    ),
    # Four requests of four tokens, cut after the sixth token: the second request is in both halves.
    Case("micro-batch, first half", (4, 2), (33, 98)),
    Case("micro-batch, second half", (2, 4, 4), (100, 17, 64)),
    Case("capture, one token", *_alike(8, 1), call=Call.CAPTURE),
    Case("capture, K + 1", *_alike(8, 1 + DRAFT_TOKENS), call=Call.CAPTURE),
)
"""All batches, in the order of the tables."""

UPDATED: tuple[Case, ...] = (Case("updated draft step", (1,) * 4, _after(2), call=Call.UPDATE),)
"""Further batches for a builder with `supports_draft_decode_metadata_update`."""


_ON_DEVICE = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")


@dataclass(frozen=True, slots=True)
class MetadataFactory:
    """Makes the common metadata of a case.

    Attributes:
        has_lengths: Whether the class has a field for exact host lengths.
        has_bound: Whether it has one for the upper bound.
        make: Makes the metadata from all fields by name; host lengths and the bound may be None.
    """

    has_lengths: bool
    has_bound: bool
    make: Callable[[dict[str, Any]], Any]

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All that the host may be told with these fields; the first, exact lengths, is the reference."""
        return tuple(host for host in Host if host is not Host.STALE or (self.has_lengths and self.has_bound))

    @property
    def realistic(self) -> Host:
        """What the host knows without waiting, in an engine with asynchronous speculative decoding."""
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
        """The metadata of `case`; `place` puts tensors into device memory, and `extra` fields override those made here.

        `max_seq_len` is the greatest bound under `BOUND` and `STALE`, else exact.
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
    """The factory for the loaded vLLM's own class, with the fields that the class has.

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
    """The factory for `vllm_async_spec.CommonAttentionMetadata`."""

    def make(fields: dict[str, Any]) -> CommonAttentionMetadata:
        ours = {name: fields[name] for name in fields if name not in ("lengths", "computed", "bound")}
        # Host lengths need an epoch, which no builder may advance.
        told = {"_seq_lens_cpu": fields["lengths"], "seq_lens_cpu_upper_bound": fields["bound"]}
        return CommonAttentionMetadata(**ours, **told, epoch=Epoch())

    return MetadataFactory(True, True, make)
