"""Removes a device read from vLLM's fast prefill for models that share KV caches.

Layers that share a KV cache run only on the tokens that the sampler needs. vLLM counts these tokens per request on the
device and copies the result to the host without waiting, but builders read it at once. The host knows the counts,
because it scheduled the tokens. One patch notes the counts of each request on the tensor of indices, in the runner. The
other computes the offsets from that note.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_async_spec.host_copy import HostCopy
from vllm_async_spec.known_on_host import known_on_host
from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.patches.metadata import without_host_lengths

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream_batch import CommonMetadata, FastPrefillRunner

_MAKE = "make_kv_sharing_fast_prefill_common_attn_metadata"
_PREPARE = "_prepare_kv_sharing_fast_prefill"
_CALCULATE = "_calc_spec_decode_metadata"
_NOTED = "tokens_per_request"
"""An attribute of the indices tensor: (requests,) NumPy integers, the number of indices per request."""

_HOST_LENGTHS = ("seq_lens_cpu_upper_bound", "_seq_lens_cpu", "_num_computed_tokens_cpu")


def _apply(transaction: Transaction, module: ModuleType) -> None:
    original, metadata_class = getattr(module, _MAKE), without_host_lengths(module.CommonAttentionMetadata)

    @functools.wraps(original)
    def make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata: CommonMetadata) -> object:
        given = common_attn_metadata
        if given.max_query_len == 1 or given.logits_indices_padded is None or given.num_logits_indices is None:
            return original(given)
        indices = given.logits_indices_padded[: given.num_logits_indices]
        starts = torch.searchsorted(indices, given.query_start_loc, out_int32=True)
        starts_cpu = _starts(getattr(given.logits_indices_padded, _NOTED, None), given)
        if starts_cpu is None:
            record_fallback("KV-sharing fast prefill")
            starts_cpu = HostCopy(starts, "query_start_loc").read()
        return metadata_class(
            query_start_loc=starts,
            query_start_loc_cpu=starts_cpu,
            seq_lens=given.seq_lens,
            num_reqs=given.num_reqs,
            num_actual_tokens=given.num_logits_indices,
            max_query_len=int(starts_cpu.diff().max()),
            max_seq_len=given.max_seq_len,
            block_table_tensor=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            causal=True,
            **{name: getattr(given, name) for name in _HOST_LENGTHS if hasattr(given, name)},
        )

    transaction.set_function(module, _MAKE, make_kv_sharing_fast_prefill_common_attn_metadata)


def _starts(counts: npt.NDArray[np.int32] | None, metadata: CommonMetadata) -> torch.Tensor | None:
    """(num_reqs + 1,) int32, host: offsets computed from the counts; None if these are of another batch."""
    if counts is None or len(counts) > metadata.num_reqs or int(counts.sum()) != metadata.num_logits_indices:
        return None
    starts = np.full(metadata.num_reqs + 1, metadata.num_logits_indices, dtype=np.int32)
    starts[0] = 0
    np.cumsum(counts, out=starts[1 : len(counts) + 1])
    return torch.from_numpy(starts)


class _LastKnown(torch.Tensor):
    """Device indices whose last one the host knows. Only vLLM up to 0.20 calls `item` on it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    last: torch.Tensor

    def __getitem__(self, at: Any) -> torch.Tensor:
        """Device indices; the one at -1 is known on the host."""
        found: torch.Tensor = super().__getitem__(at)
        return known_on_host(found, self.last) if isinstance(at, int) and at == -1 else found


def _apply_counts(transaction: Transaction, module: ModuleType) -> None:
    runner = module.GPUModelRunner
    calculate, prepare = getattr(runner, _CALCULATE), getattr(runner, _PREPARE)

    @functools.wraps(calculate)
    def _calc_spec_decode_metadata(
        self: FastPrefillRunner, num_draft_tokens: npt.NDArray[np.int32], *args: Any, **kwargs: Any
    ) -> object:
        made = calculate(self, num_draft_tokens, *args, **kwargs)
        setattr(made.logits_indices, _NOTED, num_draft_tokens + 1)
        return made

    @functools.wraps(prepare)
    def _prepare_kv_sharing_fast_prefill(self: FastPrefillRunner, logits_indices: torch.Tensor) -> torch.Tensor:
        requests = self.input_batch.num_reqs
        counts = getattr(logits_indices, _NOTED, None)
        if counts is None and len(logits_indices) == requests:
            counts = np.ones(requests, dtype=np.int32)
        known: _LastKnown = logits_indices.as_subclass(_LastKnown)
        known.last = torch.tensor(int(self.query_start_loc.np[requests]) - 1, device="cpu")
        padded: torch.Tensor = prepare(self, known)
        # vLLM makes this view anew each step, so the note can't outlive the step.
        setattr(padded, _NOTED, counts)
        return padded

    transaction.set(runner, _CALCULATE, _calc_spec_decode_metadata)
    transaction.set(runner, _PREPARE, _prepare_kv_sharing_fast_prefill)


def _apply_v2(transaction: Transaction, module: ModuleType) -> None:
    helper = module.FastPrefillHelper
    prepare = helper.prepare
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def wrapped(self: object, *args: Any, **kwargs: Any) -> object:
        made = prepare(self, *args, **kwargs)
        if made is not None:
            ends = signature.bind(self, *args, **kwargs).arguments["cu_num_logits_np"]
            setattr(made.logits_indices_padded, _NOTED, np.diff(ends))
        return made

    transaction.set(helper, "prepare", wrapped)


IMPLEMENTATIONS = {
    "fast-prefill-counts": Implementation(_apply_counts),
    "fast-prefill-counts-v2": Implementation(_apply_v2),
    "fast-prefill-offsets": Implementation(_apply),
}
