"""Computes each rank's part of a sequence from device lengths, with decode context parallelism, for V1 from 0.19 on.

Kernels mask by `dcp_local_seq_lens`: the tokens of a request that lie on this rank's GPU. The runner computes them on
the host, from a bound that counts every draft in flight as accepted. The device knows the exact lengths.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import CpuGpuBuffer


class LocalLengths:
    """The runner's buffer of local lengths, of which the device computes its part where vLLM copies the host's.

    Args:
        buffer: vLLM's. Its `cpu`, the host's bound, stays as it is; `gpu`, (requests,) int32, is written.
        seq_lens: (requests,) int32 on the device, the exact lengths; zero after the last request of a batch.
        ranks: that share each request's KV cache.
        rank: this one.
        interleave: tokens in a row on one rank.
    """

    def __init__(self, buffer: CpuGpuBuffer, seq_lens: torch.Tensor, ranks: int, rank: int, interleave: int) -> None:
        self.cpu, self.gpu, self.np = buffer.cpu, buffer.gpu, buffer.np
        self._seq_lens = seq_lens
        self._ranks, self._first, self._interleave = ranks, rank * interleave, interleave
        self._rest = torch.empty_like(self.gpu)

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Compute the local lengths of the first `n` requests, or of all, without waiting; (n,) int32 on the device."""
        local, rest, whole = self.gpu[:n], self._rest[:n], self._seq_lens[:n]
        torch.div(whole, self._interleave * self._ranks, rounding_mode="floor", out=local)
        local.mul_(self._interleave)  # in rounds of all ranks
        torch.sub(whole, local, alpha=self._ranks, out=rest)  # in the round that is not full
        return local.add_(rest.sub_(self._first).clamp_(0, self._interleave))


def take_device_lengths(runner: Any) -> None:
    """Give the runner a `LocalLengths`, if its lengths on the host are bounds and ranks share each request's cache."""
    if runner.use_async_spec_decode and runner.dcp_world_size > 1:
        buffer = runner.dcp_local_seq_lens
        if not isinstance(buffer, LocalLengths):
            interleave = runner.parallel_config.cp_kv_cache_interleave_size
            runner.dcp_local_seq_lens = LocalLengths(
                buffer, runner.seq_lens, runner.dcp_world_size, runner.dcp_rank, interleave
            )


def _apply(transaction: Transaction, module: ModuleType) -> None:
    cls = module.GPUModelRunner
    original = cls._build_attention_metadata

    @functools.wraps(original)
    def _build_attention_metadata(self: Any, *args: object, **kwargs: object) -> object:
        take_device_lengths(self)
        return original(self, *args, **kwargs)

    transaction.set(cls, "_build_attention_metadata", _build_attention_metadata)


IMPLEMENTATIONS = {"context-parallel-lengths": Implementation(_apply)}
