"""The inputs of a step, on the host and on the device, and its results: sets of buffers that steps use in turn.

All inputs of a step are one buffer, so they are one copy. What every step has comes first; the copy of a step without
prompts ends there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_async_spec.host_copy import PinnedRing

_ALIGNMENT = 16

STOPS, COUNT, TOKEN = range(3)
"""Columns of a step's results: whether the last token ends the sequence, how many tokens there are, and the first."""

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Of rows that are decoded; the device has their tokens."""

    request_slots: torch.Tensor
    """(rows,) int64: where each row's last token is, and its next goes."""
    positions: torch.Tensor
    """(rows,) int64: of the last token; with drafts an upper bound, where all of those in flight are accepted."""
    slot_mapping: torch.Tensor
    """(rows,) int64: where its keys and values are written; with drafts nobody reads it."""
    seq_lens: torch.Tensor
    """(rows,) int32, this token included; with drafts nobody reads it."""
    block_table: torch.Tensor
    """(rows, pages of a request) int32"""
    temperature: torch.Tensor
    """(rows,) float32; 0 is greedy."""
    seeds: torch.Tensor
    """(rows,) int64"""


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Of rows that are in their prompt."""

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
    """(rows,) int64: the last token of each row, among `tokens`."""
    request_slots: torch.Tensor
    """(rows,) int64: where the row's next token goes; the request slot of padding for a row that gives none."""
    temperature: torch.Tensor
    """(rows,) float32"""
    seeds: torch.Tensor
    """(rows,) int64"""
    page_indptr: torch.Tensor
    """(rows + 1,) int32: where each row's pages begin in `page_indices`, as FlashInfer's plans want it."""
    page_indices: torch.Tensor
    """(rows * pages of a request,) int32"""
    last_page_len: torch.Tensor
    """(rows,) int32"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the buffers are."""

    batch: int
    """Rows that are decoded at most."""
    prefills: int
    """Rows in their prompt at most."""
    prefill_tokens: int
    """Tokens of those together at most."""
    pages: int
    """Pages of one request at most."""
    drafts: int = 0
    """Drafts of a row that is decoded."""

    @property
    def results(self) -> int:
        """Rows of results: of decodes first, then of prefills."""
        return self.batch + self.prefills

    @property
    def columns(self) -> int:
        """Columns of results."""
        return TOKEN + 1 + self.drafts


def decode_sizes_of(batch: int, given: Sequence[int] | None) -> list[int]:
    """Numbers of rows that decodes are padded to, ascending: what was given, or powers of two and `batch`.

    Raises:
        ValueError: one is not positive, or the largest is not `batch`.
    """
    if given is None:
        return [*(1 << power for power in range(batch.bit_length()) if 1 << power < batch), batch]
    sizes = sorted(set(given))
    if not sizes or sizes[0] < 1 or sizes[-1] != batch:
        raise ValueError(f"decode_sizes is {list(given)}; it must be positive, and the largest max_batch, {batch}")
    return sizes


class Inputs:
    """One buffer, and both kinds of inputs as views of it."""

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
        """Bytes that the buffer must have."""
        return _Cursor.measure(sizes)


class _Cursor:
    """Cuts typed tensors off a buffer of bytes, one after the other."""

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
        # Of no memory: only its end is asked for.
        buffer = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
        last = Inputs(buffer, sizes).prefill.last_page_len
        end = last.storage_offset() * last.element_size() + last.numel() * last.element_size()
        return -(-end // _ALIGNMENT) * _ALIGNMENT


def arrays(inputs: DecodeInputs | PrefillInputs) -> dict[str, Array]:
    """The same memory for numpy, which writes single rows with far less ado."""
    return {each.name: getattr(inputs, each.name).numpy() for each in dataclasses.fields(inputs)}


class HostInputs:
    """What the host fills for one step: pinned where the device is a CUDA device."""

    def __init__(self, buffer: torch.Tensor, sizes: Sizes) -> None:
        self.tensors = Inputs(buffer, sizes)
        self.decode = arrays(self.tensors.decode)
        self.prefill = arrays(self.tensors.prefill)


class StepSlot:
    """One set: inputs on the device, and results there.

    Args:
        number: which one.
        sizes: of the buffers.
        device: of the model.
    """

    def __init__(self, number: int, sizes: Sizes, device: torch.device) -> None:
        self.number = number
        self.inputs = Inputs(torch.zeros(Inputs.nbytes(sizes), dtype=torch.uint8, device=device), sizes)
        self.results = torch.zeros((sizes.results, sizes.columns), dtype=torch.int64, device=device)
        """(rows, columns) int64: of each row what `STOPS` and `COUNT` name, then its tokens."""
        self.results[:, COUNT] = 1  # for good, but where drafts are verified


class StepSlots:
    """The sets, handed out in turn, and the host's buffers for them, each fenced by the copy that uses it.

    Args:
        count: one more than the steps that are launched before the results of one are read.
        sizes: of the buffers.
        device: of the model.
    """

    def __init__(self, count: int, sizes: Sizes, device: torch.device) -> None:
        self.slots = [StepSlot(number, sizes, device) for number in range(count)]
        self._turn = -1
        self._inputs = PinnedRing((Inputs.nbytes(sizes),), torch.uint8, depth=count, device=device)
        self._results = PinnedRing((sizes.results, sizes.columns), torch.int64, depth=count, device=device)
        buffers = [self._inputs.next() for _ in range(count)]
        self._host = {buffer.data_ptr(): HostInputs(buffer, sizes) for buffer in buffers}

    def next(self) -> tuple[StepSlot, HostInputs, torch.Tensor]:
        """The slot whose turn it is, the host's inputs to fill for it, and the host's results, shaped as the slot's."""
        self._turn = (self._turn + 1) % len(self.slots)
        return self.slots[self._turn], self._host[self._inputs.next().data_ptr()], self._results.next()

    def send(self, slot: StepSlot, host: HostInputs, *, prefills: bool) -> None:
        """Copy the inputs to the device; launched on the stream for that."""
        end = None if prefills else host.tensors.decode_bytes
        slot.inputs.buffer[:end].copy_(host.tensors.buffer[:end], non_blocking=True)
        self._inputs.fence()

    def fetch(self, slot: StepSlot, host: torch.Tensor) -> None:
        """Copy the results to the host; launched on the stream for that."""
        host.copy_(slot.results, non_blocking=True)
        self._results.fence()
