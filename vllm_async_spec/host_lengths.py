"""The lazy host properties of attention metadata, for our class and, grafted, for vLLM's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_async_spec.host_copy import HostCopy, Upkeep


class HostLengths:
    """Host views of device `seq_lens` for a class that has the fields named below.

    The views cost nothing until somebody insists: `seq_lens_cpu` and `num_computed_tokens_cpu` return what is known,
    else copy once, both together. After an in-place change of `seq_lens` a copy made before is not returned.
    """

    seq_lens: torch.Tensor
    """(batch,) int32, device."""
    query_start_loc: torch.Tensor
    """(batch + 1,) int32, device."""
    query_start_loc_cpu: torch.Tensor
    """(batch + 1,) int32, host."""
    max_seq_len: int

    host_upkeep: ClassVar[Upkeep] = Upkeep.NONE
    """Which host values whoever changes `seq_lens` renews himself."""

    @property
    def host_lengths(self) -> HostCopy:
        """The copy behind the properties below; made for the tensor that `seq_lens` is now."""
        copy: HostCopy | None = self.__dict__.get("_host_lengths")
        if copy is None or not copy.describes(self.seq_lens):
            copy = HostCopy(self.seq_lens, "seq_lens", upkeep=self.host_upkeep)
            self.__dict__["_host_lengths"] = copy
        return copy

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: exact lengths. Copies once where they are not known.

        Raises:
            HostSyncError: they are not known and the sync policy is `error`.
        """
        return self.host_lengths.read()

    @seq_lens_cpu.setter
    def seq_lens_cpu(self, value: torch.Tensor | None) -> None:
        self._seq_lens_cpu = value

    @property
    def _seq_lens_cpu(self) -> torch.Tensor | None:
        return self.host_lengths.known if "_host_lengths" in self.__dict__ else None

    @_seq_lens_cpu.setter
    def _seq_lens_cpu(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.__dict__.pop("_host_lengths", None)
        else:
            self.__dict__["_host_lengths"] = HostCopy(self.seq_lens, "seq_lens", given=value, upkeep=self.host_upkeep)

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """(batch,) int32, host: tokens already in the KV cache, `seq_lens_cpu` less the query lengths.

        Raises:
            HostSyncError: the lengths are not known and the sync policy is `error`.
        """
        if (known := self._num_computed_tokens_cpu) is not None:
            return known
        seq_lens_cpu = self.seq_lens_cpu
        computed = seq_lens_cpu - query_lens(self.query_start_loc_cpu)
        self.__dict__["_host_computed"] = (seq_lens_cpu, self.query_start_loc_cpu, computed)
        return computed

    @num_computed_tokens_cpu.setter
    def num_computed_tokens_cpu(self, value: torch.Tensor | None) -> None:
        self._num_computed_tokens_cpu = value

    @property
    def _num_computed_tokens_cpu(self) -> torch.Tensor | None:
        entry: tuple[Any, Any, torch.Tensor] | None = self.__dict__.get("_host_computed")
        if entry is None:
            return None
        lengths, starts, computed = entry
        given = lengths is None
        current = given or (lengths is self.host_lengths.known and starts is self.query_start_loc_cpu)
        return computed if current else None

    @_num_computed_tokens_cpu.setter
    def _num_computed_tokens_cpu(self, value: torch.Tensor | None) -> None:
        self.__dict__["_host_computed"] = None if value is None else (None, None, value)

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """(batch,) int32, device: tokens already in the KV cache. Never waits."""
        return self.seq_lens - query_lens(self.query_start_loc)

    @property
    def seq_len_upper_bound(self) -> int:
        """The honest name of `max_seq_len`: at least the longest sequence, and more by at most the drafts in flight."""
        return self.max_seq_len

    def prefetch_host(self) -> None:
        """Start copying `seq_lens` to the host now, so that reading it later waits for an event only."""
        self.host_lengths.prefetch()

    def seq_lens_changed(self) -> None:
        """Drop host copies, because a kernel wrote `seq_lens` through a raw pointer, which PyTorch can't see."""
        self.host_lengths.drop()


def query_lens(query_start_loc: torch.Tensor) -> torch.Tensor:
    """(batch + 1,) cumulative starts to (batch,) query lengths, on the tensor's own device."""
    return query_start_loc[1:] - query_start_loc[:-1]
