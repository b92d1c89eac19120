"""Removes a wait for the largest k from top-k sampling in vLLM up to 0.16.

If a batch samples with top-k and without top-p, vLLM passes the batch's largest k to `Tensor.topk`, which needs a host
number. vLLM reads it from the device, so the host waits for all launched work. But the host knows each k from the
request. The patch notes the largest k when the batch makes its sampling metadata. The same logits are masked.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_batch import SampledBatch


def _apply(transaction: Transaction, module: ModuleType) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    # Keyed by batch, because a process may have two engines. A value is valid until the batch makes new metadata.
    largest: weakref.WeakKeyDictionary[SampledBatch, int] = weakref.WeakKeyDictionary()
    make, mask = module.InputBatch._make_sampling_metadata, topk_topp_sampler.apply_top_k_only

    @functools.wraps(make)
    def _make_sampling_metadata(self: SampledBatch) -> object:
        largest[self] = 0 if self.no_top_k else _largest(self)
        return make(self)

    @functools.wraps(mask)
    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        bound = max(largest.values(), default=0)
        if bound == 0:  # in vLLM's warm-up, k belongs to no request
            masked: torch.Tensor = mask(logits, k)
            return masked
        return top_k_only(logits, k, bound)

    transaction.set(module.InputBatch, "_make_sampling_metadata", _make_sampling_metadata)
    transaction.set_function(topk_topp_sampler, "apply_top_k_only", apply_top_k_only)


def _largest(batch: SampledBatch) -> int:
    rows = batch.top_k_cpu[: batch.num_reqs]
    return int(rows[rows < batch.vocab_size].max(initial=0))


def top_k_only(logits: torch.Tensor, k: torch.Tensor, bound: int) -> torch.Tensor:
    """Mask all but the k largest logits of each row with -inf. Never waits for the device.

    Args:
        logits: (rows, vocabulary) floating point, device; masked in place.
        k: (rows,) int32, device; the size of the vocabulary for a row without top-k.
        bound: at least the largest k of the rows with top-k.

    Returns:
        `logits`.
    """
    everything = (k == logits.shape[1]).unsqueeze(1)
    smallest = logits.topk(bound, dim=1).values.gather(1, (k.clamp(max=bound) - 1).long().unsqueeze(1))
    return logits.masked_fill_((logits < smallest) & ~everything, -float("inf"))


IMPLEMENTATIONS = {"top-k-bound": Implementation(_apply)}
