"""Lazy host properties of attention metadata, for this package's class and, grafted, for vLLM's."""

from __future__ import annotations

import copy
import enum
from typing import Any, ClassVar

import torch

from vllm_async_spec.host_copy import Epoch, HostCopy


class HostLengths:
    """Host views of device `seq_lens` for a class that has the fields named below.

    A view is exact when returned. Each read copies, unless an epoch proves that an earlier copy is still current. A
    view that is never read costs nothing.
    """

    seq_lens: torch.Tensor
    """(batch,) int32, device."""
    query_start_loc: torch.Tensor
    """(batch + 1,) int32, device."""
    query_start_loc_cpu: torch.Tensor
    """(batch + 1,) int32, host."""
    max_seq_len: int
    epoch: Epoch | None

    @property
    def host_lengths(self) -> HostCopy:
        """The copy behind the properties below; made anew when `seq_lens` or the epoch becomes another."""
        copy: HostCopy | None = self.__dict__.get("_host_lengths")
        if copy is None or copy.source is not self.seq_lens or copy.epoch is not self.epoch:
            copy = self.__dict__["_host_lengths"] = HostCopy(self.seq_lens, "seq_lens", epoch=self.epoch)
        return copy

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: exact lengths. Copies if the lengths are not known.

        Raises:
            HostSyncError: the lengths are not known and the sync policy is `error`.
        """
        return self.host_lengths.read()

    @property
    def _seq_lens_cpu(self) -> torch.Tensor | None:
        known = self.host_lengths.known
        if known is None:
            return None
        # `dataclasses.replace` hands it on, perhaps beside another `seq_lens`. A view, because the tensor may be a
        # caller's own, who may give it again.
        view = known.view_as(known)
        # Under a FakeTensorMode the view has no values, and what it is handed on to may be read outside.
        return _described(view, self.seq_lens) if type(view) is type(known) else None

    @_seq_lens_cpu.setter
    def _seq_lens_cpu(self, value: torch.Tensor | None) -> None:
        self.__dict__["_host_lengths"] = HostCopy(self.seq_lens, "seq_lens", given=value, epoch=self.epoch)

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: tokens already in the KV cache, `seq_lens_cpu` less the query lengths.

        Raises:
            HostSyncError: the lengths are not known and the sync policy is `error`.
        """
        return self.seq_lens_cpu - query_lens(self.query_start_loc_cpu)

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """(batch,) int32, device: tokens already in the KV cache. Never waits."""
        return self.seq_lens - query_lens(self.query_start_loc)

    @property
    def seq_len_upper_bound(self) -> int:
        """`max_seq_len` by a clear name: at least the longest sequence, and more by at most the drafts in flight."""
        return self.max_seq_len

    def prefetch_host(self) -> None:
        """Start copying `seq_lens` to the host now, so that reading it later waits for an event only. Needs `epoch`."""
        self.host_lengths.prefetch()

    def seq_lens_changed(self) -> None:
        """Report that `seq_lens` was written in place: advances the epoch, if any."""
        if self.epoch is not None:
            self.epoch.advance()


class Trust(enum.Enum):
    """Which host values from vLLM the views return; any other read copies."""

    RENEWED = "renewed"
    """Values given to the constructor, and their replacements: vLLM 0.12 replaces each value in each draft step."""
    UNCHANGED = "unchanged"
    """Values given to the constructor, until a change of the lengths is seen: vLLM 0.13 to 0.29."""
    NONE = "none"
    """No values: vLLM 0.30 and later give none and keep none current."""


class VllmHostLengths(HostLengths):
    """The same views for vLLM's class, whose callers may give host values under these names or with an underscore.

    No copy is kept: vLLM's kernels write `seq_lens` through raw pointers, which PyTorch can't see.
    """

    host_trust: ClassVar[Trust]

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: exact lengths. Copies unless vLLM gave a value that is still trusted.

        Raises:
            HostSyncError: a copy is needed and the sync policy is `error`.
        """
        given = self._seq_lens_cpu
        return HostCopy(self.seq_lens, "seq_lens").read() if given is None else given

    @seq_lens_cpu.setter
    def seq_lens_cpu(self, value: torch.Tensor | None) -> None:
        self._seq_lens_cpu = value

    @property
    def _seq_lens_cpu(self) -> torch.Tensor | None:
        return _given(self, _LENGTHS)

    @_seq_lens_cpu.setter
    def _seq_lens_cpu(self, value: torch.Tensor | None) -> None:
        _give(self, _LENGTHS, value)

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: tokens already in the KV cache. Copies unless vLLM gave a value that is still trusted.

        Raises:
            HostSyncError: a copy is needed and the sync policy is `error`.
        """
        if (given := self._num_computed_tokens_cpu) is not None:
            return given
        if (lengths := self._seq_lens_cpu) is not None:
            return lengths - query_lens(self.query_start_loc_cpu)
        # Subtract on the device: from vLLM 0.31 on, only the device knows how many drafts a request verifies.
        return HostCopy(self.num_computed_tokens, "num_computed_tokens").read()

    @num_computed_tokens_cpu.setter
    def num_computed_tokens_cpu(self, value: torch.Tensor | None) -> None:
        self._num_computed_tokens_cpu = value

    @property
    def _num_computed_tokens_cpu(self) -> torch.Tensor | None:
        return _given(self, _COMPUTED)

    @_num_computed_tokens_cpu.setter
    def _num_computed_tokens_cpu(self, value: torch.Tensor | None) -> None:
        _give(self, _COMPUTED, value)

    def prefetch_host(self) -> None:
        """Warn that nothing is prefetched: without an epoch, nothing can prove the value current."""
        HostCopy(self.seq_lens, "seq_lens").prefetch()

    def seq_lens_changed(self) -> None:
        """Drop vLLM's host values, because `seq_lens` was written in place."""
        self._seq_lens_cpu = self._num_computed_tokens_cpu = None


class host_values_of:
    """Context for the constructor of `metadata`: ties each host value given to the lengths given with it.

    A class, because every metadata object of a step enters this context, and a generator costs twice as much.
    """

    __slots__ = ("_metadata",)

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def __enter__(self) -> None:
        self._metadata.__dict__[_CONSTRUCTING] = True

    def __exit__(self, *raised: object) -> None:
        metadata = self._metadata
        values = metadata.__dict__
        del values[_CONSTRUCTING]
        for name in _GIVEN_NAMES:
            value = values.get(name)
            # `dataclasses.replace` hands values on: keep the record of the lengths that a value was first given for.
            if isinstance(value, torch.Tensor) and not hasattr(value, _DESCRIBED):
                _described(value, metadata.seq_lens)


def with_host_values(metadata: Any, value: torch.Tensor) -> Any:
    """A shallow copy of vLLM's metadata whose host views all return `value`, for upstream code that reads bounds there.

    Args:
        metadata: vLLM's metadata, with grafted views or vLLM's own.
        value: (batch,) int32, host.
    """
    stand_in = copy.copy(metadata)
    if isinstance(getattr(type(metadata), "host_trust", None), Trust):
        stand_in.__dict__[_STAND_IN] = value
    else:
        stand_in._seq_lens_cpu = stand_in._num_computed_tokens_cpu = value
    return stand_in


_CONSTRUCTING, _STAND_IN = "_host_constructing", "_host_stand_in"
_GIVEN_NAMES = _LENGTHS, _COMPUTED = "_host_given_lengths", "_host_given_computed"
_DESCRIBED = "_async_spec_described"
"""Attribute of a host value: its `_Described`."""


class _Described:
    """The device lengths that a host value is of, and their version then; what `copy` and `pickle` make is of none."""

    __slots__ = ("seq_lens", "version")

    def __init__(self, seq_lens: torch.Tensor | None = None, version: int | None = None) -> None:
        self.seq_lens = seq_lens
        self.version = version

    def __reduce__(self) -> tuple[Any, ...]:
        return _Described, ()


def _described(value: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    setattr(value, _DESCRIBED, _Described(seq_lens, _version(seq_lens)))
    return value


def is_of_others(value: torch.Tensor, seq_lens: torch.Tensor) -> bool:
    """Whether `value` was handed on from metadata with other device lengths."""
    of: _Described | None = getattr(value, _DESCRIBED, None)
    return of is not None and of.seq_lens is not seq_lens


def _given(metadata: Any, name: str) -> torch.Tensor | None:
    """The value that vLLM gave, if still trusted; else None."""
    values = metadata.__dict__
    value: torch.Tensor | None = values.get(_STAND_IN)
    if value is not None:
        return value
    value = values.get(name)
    if value is None or metadata.host_trust is Trust.RENEWED:
        return value
    of: _Described = getattr(value, _DESCRIBED, None) or _Described()
    unchanged = of.seq_lens is metadata.seq_lens and of.version is not None and of.version == _version(of.seq_lens)
    return value if unchanged and metadata.host_trust is Trust.UNCHANGED else None


def _give(metadata: Any, name: str, value: torch.Tensor | None) -> None:
    """Store an assigned value: in the constructor always, later only to renew a value given there; else store None."""
    values = metadata.__dict__
    renews = metadata.host_trust is Trust.RENEWED and values.get(name) is not None
    values[name] = value if renews or _CONSTRUCTING in values else None


def _version(tensor: torch.Tensor) -> int | None:
    """PyTorch's count of in-place changes; None for inference tensors, which have no counter."""
    return None if tensor.is_inference() else tensor._version


def query_lens(query_start_loc: torch.Tensor) -> torch.Tensor:
    """(batch + 1,) cumulative starts to (batch,) query lengths, on the tensor's own device."""
    return query_start_loc[1:] - query_start_loc[:-1]
