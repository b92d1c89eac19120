"""Sets of buffers that steps use in turn: a step's inputs, on the host and on the device, and its results.

All inputs of a step share one buffer, so one copy sends them. Decode inputs come first; the copy of a step without
prompts ends after them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_async_spec.host_copy import PinnedRing

_ALIGNMENT = 16

STOPS, COUNT, TOKEN = range(3)
"""Columns of a step's results: whether the last token ends the sequence, the number of tokens, the first token."""

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of decode rows; the device has their tokens."""

    request_slots: torch.Tensor
    """(rows,) int64: where each row reads its last token and writes its next token."""
    positions: torch.Tensor
    """(rows,) int64: of the last token; with drafts an upper bound, as if all drafts in flight were accepted."""
    slot_mapping: torch.Tensor
    """(rows,) int64: where keys and values are written; unused with drafts."""
    seq_lens: torch.Tensor
    """(rows,) int32, this token included; unused with drafts."""
    block_table: torch.Tensor
    """(rows, pages of a request) int32"""
    temperature: torch.Tensor
    """(rows,) float32; 0 is greedy."""
    seeds: torch.Tensor
    """(rows,) int64"""


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Inputs of prefill rows."""

    tokens: torch.Tensor
    """(tokens,) int64"""
    positions: torch.Tensor
    """(tokens,) int64"""
    slot_mapping: torch.Tensor
    """(tokens,) int64"""
    query_start_loc: torch.Tensor
    """(rows + 1,) int32"""
    seq_lens: torch.Tensor
    """(rows,) int32"""
    block_table: torch.Tensor
    """(rows, pages of a request) int32"""
    last: torch.Tensor
    """(rows,) int64: index in `tokens` of each row's last token."""
    request_slots: torch.Tensor
    """(rows,) int64: where each row's next token goes; the padding slot for a row that yields no token."""
    temperature: torch.Tensor
    """(rows,) float32"""
    seeds: torch.Tensor
    """(rows,) int64"""
    page_indptr: torch.Tensor
    """(rows + 1,) int32: where each row's pages begin in `page_indices`, as FlashInfer's plans expect."""
    page_indices: torch.Tensor
    """(rows * pages of a request,) int32"""
    last_page_len: torch.Tensor
    """(rows,) int32"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits that set the buffers' sizes."""

    batch: int
    """Maximum decode rows."""
    prefills: int
    """Maximum prefill rows."""
    prefill_tokens: int
    """Maximum tokens of all prefill rows together."""
    pages: int
    """Maximum pages of one request."""
    drafts: int = 0
    """Drafts of a decode row."""

    @property
    def results(self) -> int:
        """Rows of results: decodes first, then prefills."""
        return self.batch + self.prefills

    @property
    def columns(self) -> int:
        """Columns of results."""
        return TOKEN + 1 + self.drafts


def decode_sizes_of(batch: int, given: Sequence[int] | None) -> list[int]:
    """Numbers of rows that decodes are padded to, ascending: `given`, or powers of two and `batch`.

    Raises:
        ValueError: one is no positive number, or the largest is not `batch`.
    """
    if given is None:
        return [*(1 << power for power in range(batch.bit_length()) if 1 << power < batch), batch]
    try:
        given = list(given)
        sizes = sorted({operator.index(size) for size in given})
    except TypeError:
        raise ValueError(f"decode_sizes is {given!r}; it must be a sequence of whole numbers") from None
    if not sizes or sizes[0] < 1 or sizes[-1] != batch:
        raise ValueError(
            f"decode_sizes is {given}; the sizes must be positive, and the largest must be max_batch, {batch}"
        )
    return sizes


class Inputs:
    """One buffer, with decode inputs and prefill inputs as views of it."""

    def __init__(self, buffer: torch.Tensor, sizes: Sizes) -> None:
        self.buffer = buffer
        cursor = _Cursor(buffer)
        rows = (sizes.batch,)
        self.decode = DecodeInputs(
            request_slots=cursor.cut(rows, torch.int64),
            positions=cursor.cut(rows, torch.int64),
            slot_mapping=cursor.cut(rows, torch.int64),
            seq_lens=cursor.cut(rows, torch.int32),
            block_table=cursor.cut((sizes.batch, sizes.pages), torch.int32),
            temperature=cursor.cut(rows, torch.float32),
            seeds=cursor.cut(rows, torch.int64),
        )
        self.decode_bytes = cursor.at
        rows, tokens = (sizes.prefills,), (sizes.prefill_tokens,)
        starts = (sizes.prefills + 1,)
        self.prefill = PrefillInputs(
            tokens=cursor.cut(tokens, torch.int64),
            positions=cursor.cut(tokens, torch.int64),
            slot_mapping=cursor.cut(tokens, torch.int64),
            query_start_loc=cursor.cut(starts, torch.int32),
            seq_lens=cursor.cut(rows, torch.int32),
            block_table=cursor.cut((sizes.prefills, sizes.pages), torch.int32),
            last=cursor.cut(rows, torch.int64),
            request_slots=cursor.cut(rows, torch.int64),
            temperature=cursor.cut(rows, torch.float32),
            seeds=cursor.cut(rows, torch.int64),
            page_indptr=cursor.cut(starts, torch.int32),
            page_indices=cursor.cut((sizes.prefills * sizes.pages,), torch.int32),
            last_page_len=cursor.cut(rows, torch.int32),
        )

    @staticmethod
    def nbytes(sizes: Sizes) -> int:
        """Bytes that the buffer needs."""
        return _Cursor.measure(sizes)


class _Cursor:
    """Cuts typed tensors off a buffer of bytes, one after another."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.at = 0

    def cut(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        part = self._buffer[self.at : self.at + nbytes].view(dtype).view(shape)
        self.at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return part

    @staticmethod
    def measure(sizes: Sizes) -> int:
        # A meta tensor takes no memory; only the last offset is needed.
        buffer = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
        last = Inputs(buffer, sizes).prefill.last_page_len
        end = last.storage_offset() * last.element_size() + last.numel() * last.element_size()
        return -(-end // _ALIGNMENT) * _ALIGNMENT


def arrays(inputs: DecodeInputs | PrefillInputs) -> dict[str, Array]:
    """The same memory as numpy arrays, which write single rows much faster."""
    return {each.name: getattr(inputs, each.name).numpy() for each in dataclasses.fields(inputs)}


class HostInputs:
    """The host's inputs of one step; pinned if the model is on a CUDA device."""

    def __init__(self, buffer: torch.Tensor, sizes: Sizes) -> None:
        self.tensors = Inputs(buffer, sizes)
        self.decode = arrays(self.tensors.decode)
        self.prefill = arrays(self.tensors.prefill)


class StepSlot:
    """One set of buffers on the device, of these sizes: inputs and results. `number` is the index of the set."""

    def __init__(self, number: int, sizes: Sizes, device: torch.device) -> None:
        self.number = number
        self.inputs = Inputs(torch.zeros(Inputs.nbytes(sizes), dtype=torch.uint8, device=device), sizes)
        self.results = torch.zeros((sizes.results, sizes.columns), dtype=torch.int64, device=device)
        """(rows, columns) int64: for each row the columns `STOPS` and `COUNT`, then its tokens."""
        self.results[:, COUNT] = 1  # only rows with drafts change this


class StepSlots:
    """The sets, used in turn, and the host's buffers for them, each fenced by the copy that uses it.

    There is one more than the steps launched before a step's results are read.
    """

    def __init__(self, count: int, sizes: Sizes, device: torch.device) -> None:
        self.slots = [StepSlot(number, sizes, device) for number in range(count)]
        self._turn = -1
        self._inputs = PinnedRing((Inputs.nbytes(sizes),), torch.uint8, depth=count, device=device)
        self._results = PinnedRing((sizes.results, sizes.columns), torch.int64, depth=count, device=device)
        buffers = [self._inputs.next() for _ in range(count)]
        self._host = {buffer.data_ptr(): HostInputs(buffer, sizes) for buffer in buffers}

    def next(self) -> tuple[StepSlot, HostInputs, torch.Tensor]:
        """The next slot, the host's inputs to fill for it, and the host's results, shaped as the slot's."""
        self._turn = (self._turn + 1) % len(self.slots)
        return self.slots[self._turn], self._host[self._inputs.next().data_ptr()], self._results.next()

    def send(self, slot: StepSlot, host: HostInputs, *, prefills: bool) -> None:
        """Copy the inputs to the device, on the current stream."""
        end = None if prefills else host.tensors.decode_bytes
        slot.inputs.buffer[:end].copy_(host.tensors.buffer[:end], non_blocking=True)
        self._inputs.fence()

    def fetch(self, slot: StepSlot, host: torch.Tensor) -> None:
        """Copy the results to the host, on the current stream."""
        host.copy_(slot.results, non_blocking=True)
        self._results.fence()
