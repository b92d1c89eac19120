"""Attention metadata of a batch, whose exact sequence lengths only the device holds."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import InitVar, dataclass
from itertools import pairwise
from typing import Any

import torch

from vllm_async_spec.host_copy import Epoch
from vllm_async_spec.host_lengths import HostLengths, is_of_others, query_lens


class MetadataError(ValueError):
    """An invalid field of `CommonAttentionMetadata`: the message gives its name, its value and what it must be."""


@dataclass(eq=False, repr=False)
class CommonAttentionMetadata(HostLengths):
    """Per-batch attention metadata, shared by all layers and backends; vLLM's class of that name without its syncs.

    Constructing, slicing, splitting, replacing and advancing never wait for the device. Rows after the live
    requests may be padding: query length 0 and `seq_lens` 0. "Device" below is the device of `seq_lens`, which may
    be the CPU.

    Raises:
        MetadataError: a field has the wrong type, dtype, shape or device.
    """

    query_start_loc: torch.Tensor
    """(batch + 1,) int32, device: where each request's query begins in the flattened tokens."""
    query_start_loc_cpu: torch.Tensor
    """(batch + 1,) int32, host: the same values, which the host knows because it makes the schedule."""
    seq_lens: torch.Tensor
    """(batch,) int32, device: exact length of each request, in tokens computed and newly scheduled."""
    num_reqs: int
    """Rows, padding included."""
    num_actual_tokens: int
    """Query tokens of the batch; may count padding after the last request."""
    max_query_len: int
    """Longest query."""
    max_seq_len: int
    """Upper bound of `seq_lens`, off by at most the draft tokens in flight; see `seq_len_upper_bound`."""
    block_table_tensor: torch.Tensor
    """(batch, pages) int32, device: the KV pages of each request."""
    slot_mapping: torch.Tensor
    """(num_actual_tokens or more,) int64, device: the KV slot that each query token is written to."""
    causal: bool = True
    """Whether a query token sees no later token."""
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    """(batch,) int32, host: upper bound of each row of `seq_lens`, exact on rows that are still prefilling."""
    is_prefilling: torch.Tensor | None = None
    """(batch,) bool, host or device: rows whose prompt is not yet computed."""
    epoch: Epoch | None = None
    """Advances when `seq_lens` changes. With an epoch, host copies are kept and prefetched; else each read copies."""
    _seq_lens_cpu: InitVar[torch.Tensor | None] = None
    """(batch,) int32, host: exact lengths, if the host already knows them; used only with an epoch."""

    def __post_init__(self, _seq_lens_cpu: torch.Tensor | None) -> None:
        batch = (self.num_reqs,)
        device = self.seq_lens.device if isinstance(self.seq_lens, torch.Tensor) else None
        _check_count("num_reqs", self.num_reqs)
        for name in ("num_actual_tokens", "max_query_len", "max_seq_len"):
            _check_count(name, getattr(self, name))
        _check("seq_lens", self.seq_lens, shape=batch, device=device)
        _check("query_start_loc", self.query_start_loc, shape=(self.num_reqs + 1,), device=device)
        _check("query_start_loc_cpu", self.query_start_loc_cpu, shape=(self.num_reqs + 1,), device=_HOST)
        _check("block_table_tensor", self.block_table_tensor, shape=(self.num_reqs, None), device=device)
        _check("slot_mapping", self.slot_mapping, shape=(None,), device=device, dtype=torch.int64)
        if not isinstance(self.causal, bool):
            raise MetadataError(f"causal is {_shown(self.causal)}; it must be True or False")
        if not (self.epoch is None or isinstance(self.epoch, Epoch)):
            raise MetadataError(f"epoch is {_shown(self.epoch)}; it must be an Epoch, as Epoch() makes, or None")
        if self.slot_mapping.shape[0] < self.num_actual_tokens:
            raise MetadataError(
                f"slot_mapping has {self.slot_mapping.shape[0]} entries; it must have at least num_actual_tokens, "
                f"{self.num_actual_tokens}"
            )
        if self.seq_lens_cpu_upper_bound is not None:
            _check("seq_lens_cpu_upper_bound", self.seq_lens_cpu_upper_bound, shape=batch, device=_HOST)
        if self.is_prefilling is not None:
            _check("is_prefilling", self.is_prefilling, shape=batch, dtype=torch.bool)
        if _seq_lens_cpu is not None:
            _check("_seq_lens_cpu", _seq_lens_cpu, shape=batch, device=_HOST)
            if not is_of_others(_seq_lens_cpu, self.seq_lens):
                self._seq_lens_cpu = _seq_lens_cpu

    def __repr__(self) -> str:
        """Tensors by dtype, shape and device: printing their values would wait for the device."""
        fields = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(self))
        return f"CommonAttentionMetadata({', '.join(f'{name}={_shown(value)}' for name, value in fields)})"

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: exact lengths. Copies if they are not known. Assign what the host knows, or None.

        Raises:
            HostSyncError: the lengths are not known and the sync policy is `error`.
            MetadataError: what is assigned has the wrong type, dtype, shape or device.
        """
        return self.host_lengths.read()

    @seq_lens_cpu.setter
    def seq_lens_cpu(self, value: torch.Tensor | None) -> None:
        if value is not None:
            _check("seq_lens_cpu", value, shape=tuple(self.seq_lens.shape), device=_HOST)
        self._seq_lens_cpu = value

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        """A copy with `changes`; a known host copy stays known unless `seq_lens` or the epoch is replaced.

        Raises:
            MetadataError: a changed field is invalid.
            TypeError: a change names no field.
        """
        known = None if changes.keys() & {"seq_lens", "epoch"} else self._seq_lens_cpu
        return dataclasses.replace(self, **{"_seq_lens_cpu": known} | changes)

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """The first `num_actual_reqs` requests and `num_actual_tokens` tokens: padding cut off.

        Raises:
            MetadataError: the batch has fewer requests or tokens, these requests have more query tokens, or an argument
                is no integer.
        """
        num_actual_reqs = _within("num_actual_reqs", num_actual_reqs, self.num_reqs)
        num_actual_tokens = _within("num_actual_tokens", num_actual_tokens, self.num_actual_tokens)
        queried = int(self.query_start_loc_cpu[num_actual_reqs])
        if num_actual_tokens < queried:
            raise MetadataError(
                f"num_actual_tokens is {num_actual_tokens}; it must be at least {queried}, the query tokens of the "
                f"{num_actual_reqs} requests"
            )
        rows = slice(0, num_actual_reqs)
        return self._rows(
            rows,
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            num_actual_tokens=num_actual_tokens,
            slot_mapping=self.slot_mapping[:num_actual_tokens],
        )

    def slice_requests(self, start: int, stop: int) -> CommonAttentionMetadata:
        """Requests `start` to `stop` (excluded), as a batch of their own.

        Raises:
            MetadataError: not 0 <= start <= stop <= num_reqs, or one of them is no integer.
        """
        stop = _within("stop", stop, self.num_reqs)
        start = _within("start", start, stop)
        first_token = int(self.query_start_loc_cpu[start])
        # Token padding follows the last request, and stays with it.
        last = stop == self.num_reqs and start < stop
        end_token = self.num_actual_tokens if last else int(self.query_start_loc_cpu[stop])
        starts = slice(start, stop + 1)
        starts_cpu = self.query_start_loc_cpu[starts] - first_token
        return self._rows(
            slice(start, stop),
            query_start_loc=self.query_start_loc[starts] - first_token,
            query_start_loc_cpu=starts_cpu,
            num_actual_tokens=end_token - first_token,
            slot_mapping=self.slot_mapping[first_token:end_token],
            max_query_len=int(query_lens(starts_cpu).max()) if start < stop else 0,
            max_seq_len=self._bound(start, stop),
        )

    def split(self, *token_offsets: int) -> tuple[CommonAttentionMetadata, ...]:
        """Micro-batches: the batch cut before each of `token_offsets` (ascending).

        A request that a cut divides is in both parts; in the earlier part its sequence ends at the cut. A request
        without query tokens at a cut is in the earlier part. Padding rows and tokens go to the last part.

        Raises:
            MetadataError: the offsets are not integers that ascend strictly within the batch.
        """
        total = int(self.query_start_loc_cpu[-1])
        offsets = [index for each in token_offsets if (index := _index(each)) is not None]
        cuts = (0, *offsets, total)
        if len(offsets) < len(token_offsets) or any(a >= b for a, b in pairwise(cuts)):
            raise MetadataError(
                f"token_offsets is {token_offsets}; it must be integers that ascend strictly between 0 and the {total} "
                "query tokens"
            )
        return tuple(self._token_range(a, b) for a, b in pairwise(cuts))

    def advance(self, num_tokens: int = 1) -> None:
        """Add `num_tokens` tokens to every live request, in place on the device, as a draft step does.

        The bounds rise by the same number, and the epoch advances. A known host copy advances into a new tensor,
        because a copy in flight may still read the old one. A pending prefetch is dropped. A part shares `seq_lens`
        with the batch that it was cut from, whose bounds do not rise: advance one of the two.

        Raises:
            MetadataError: `num_tokens` is negative or no integer.
        """
        num_tokens = _within("num_tokens", num_tokens, _INT32_MAX)
        _check_count("max_seq_len + num_tokens", self.max_seq_len + num_tokens)
        # All are made before one is written, because on a CPU they may be one tensor.
        grown = _grown(self.seq_lens, num_tokens)
        known, bound = (
            None if each is None else _grown(each, num_tokens)
            for each in (self._seq_lens_cpu, self.seq_lens_cpu_upper_bound)
        )
        self.seq_lens.copy_(grown)
        self.seq_lens_changed()
        if known is not None:
            self._seq_lens_cpu = known
        self.seq_lens_cpu_upper_bound = bound
        self.max_seq_len += num_tokens

    def _token_range(self, first: int, end: int) -> CommonAttentionMetadata:
        """Query tokens `first` to `end` (excluded), not empty."""
        starts = self.query_start_loc_cpu
        # `_request_of` passes over rows without query tokens, and the first rows may be such.
        start, head = self._request_of(first) if first else (0, 0)
        stop, behind = self._request_of(end)
        last = end == int(starts[-1])
        if last:
            stop, tail = self.num_reqs, 0
        elif behind:
            stop, tail = stop + 1, int(starts[stop + 1]) - end
        else:
            tail = 0
        part = self.slice_requests(start, stop)
        starts_cpu = (part.query_start_loc_cpu - head).clamp_(0, end - first)
        slots = self.slot_mapping[first : self.num_actual_tokens if last else end]
        part = part.replace(
            query_start_loc=(part.query_start_loc - head).clamp_(0, end - first),
            query_start_loc_cpu=starts_cpu,
            max_query_len=int(query_lens(starts_cpu).max()),
            num_actual_tokens=slots.shape[0],
            slot_mapping=slots,
        )
        return part._shortened(tail) if tail else part

    def _request_of(self, token: int) -> tuple[int, int]:
        """The request whose query holds `token`, and how many of its query tokens come before it."""
        row = int(torch.searchsorted(self.query_start_loc_cpu, token, right=True)) - 1
        return row, token - int(self.query_start_loc_cpu[row])

    def _shortened(self, tokens: int) -> CommonAttentionMetadata:
        """The same batch with the last request's sequence ending `tokens` earlier."""

        def shorten(lengths: torch.Tensor) -> torch.Tensor:
            lengths = lengths.clone()
            lengths[-1] -= tokens
            return lengths

        bound, known = self.seq_lens_cpu_upper_bound, self._seq_lens_cpu
        new = self.replace(
            seq_lens=shorten(self.seq_lens),
            seq_lens_cpu_upper_bound=None if bound is None else shorten(bound),
            _seq_lens_cpu=None if known is None else shorten(known),
        )
        new.max_seq_len = new._bound(0, new.num_reqs)
        return new

    def _bound(self, start: int, stop: int) -> int:
        """The lowest upper bound of these rows' lengths that the host knows."""
        known = self.seq_lens_cpu_upper_bound if self.seq_lens_cpu_upper_bound is not None else self._seq_lens_cpu
        if known is None or start == stop:
            return self.max_seq_len
        return min(self.max_seq_len, int(known[start:stop].max()))

    def _rows(self, rows: slice, **changes: Any) -> CommonAttentionMetadata:
        """The same batch with every per-request field cut to `rows`, and `changes`."""
        return self.replace(
            seq_lens=self.seq_lens[rows],
            num_reqs=rows.stop - rows.start,
            block_table_tensor=self.block_table_tensor[rows],
            seq_lens_cpu_upper_bound=_maybe(self.seq_lens_cpu_upper_bound, rows),
            is_prefilling=_maybe(self.is_prefilling, rows),
            _seq_lens_cpu=_maybe(self._seq_lens_cpu, rows),
            **changes,
        )


# The default in the class body makes the field optional; left as a class attribute, it would hide the property.
del CommonAttentionMetadata._seq_lens_cpu

_HOST = torch.device("cpu")


_INT32_MAX = torch.iinfo(torch.int32).max


def _grown(lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`lengths` with `num_tokens` more on every row but padding."""
    return lengths + (lengths > 0).to(lengths.dtype) * num_tokens


def _shown(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)


def _maybe(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def _check(
    name: str,
    value: object,
    *,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.int32,
) -> None:
    """Refuse a tensor that is not of this dtype, shape (None: any size) and device (None: any)."""
    if not isinstance(value, torch.Tensor):
        raise MetadataError(f"{name} is {type(value).__name__} {value!r}; it must be a {dtype} tensor")
    if value.dtype != dtype:
        raise MetadataError(f"{name} is {value.dtype}; it must be {dtype}")
    if value.dim() != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, value.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise MetadataError(f"{name} has shape {tuple(value.shape)}; it must be ({wanted})")
    if device is not None and value.device != device:
        raise MetadataError(f"{name} is on {value.device}; it must be on {device}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INT32_MAX:
        raise MetadataError(f"{name} is {value!r}; it must be an integer from 0 to {_INT32_MAX}")


def _within(name: str, value: object, most: int) -> int:
    """`value` as an int from 0 to `most`."""
    index = _index(value)
    if index is None or not 0 <= index <= most:
        raise MetadataError(f"{name} is {_shown(value)}; it must be an integer from 0 to {most}")
    return index


def _index(value: object) -> int | None:
    """An integer, NumPy's too, as an int; None for all else. A tensor is none, because reading it could wait."""
    if isinstance(value, bool | torch.Tensor):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
