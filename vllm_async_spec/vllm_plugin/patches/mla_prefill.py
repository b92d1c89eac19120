"""vLLM's MLA given exact lengths of requests with drafts that it sends to the prefill path.

MLA's builders split a batch by query length: what a backend's decode kernel can't take goes to the prefill path,
drafts too. There the context of each request is cut into chunks on the host, from `seq_lens_cpu_upper_bound`. That is
exact for prefills. For drafts under asynchronous scheduling it is too long by those not accepted, and the request
attends to slots that hold nothing of it. So where such a request is among those cut, its exact length is fetched: one
wait, counted as a fallback, and the price of a backend whose decode kernel does not take the batch.
"""

from __future__ import annotations

import copy
import functools
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_async_spec.host_copy import HostCopy
from vllm_async_spec.host_lengths import query_lens
from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.ledger.fingerprint import module_file

_SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"


def _unneeded(builder: Any) -> str | None:
    if "seq_lens_cpu_upper_bound" not in builder.build.__code__.co_names:
        return "MLA's prefill path takes exact lengths here"
    return None


def _no_sparse() -> str | None:
    """That this vLLM has no builder of sparse MLA with a prefill path of this kind, if it hasn't."""
    vllm = find_spec("vllm")
    if vllm is not None and vllm.origin is not None and module_file(Path(vllm.origin).parents[1], _SPARSE) is not None:
        return None
    return "sparse MLA has no such prefill path here"


def _apply(builder_name: str, transaction: Transaction, module: ModuleType) -> None:
    builder = getattr(module, builder_name)
    original = builder.build

    @functools.wraps(original)
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        bound = common_attn_metadata.seq_lens_cpu_upper_bound
        if bound is not None and self.vllm_config.speculative_config is not None:
            guarded = bound.as_subclass(_ExactForDrafts)
            guarded.metadata = common_attn_metadata
            common_attn_metadata = copy.copy(common_attn_metadata)
            common_attn_metadata.seq_lens_cpu_upper_bound = guarded
        return original(self, common_prefix_len, common_attn_metadata, fast_build)

    transaction.set(builder, "build", build)


class _ExactForDrafts(torch.Tensor):
    """Upper bounds whose slice is exact where it has a request that is not in its prompt any more.

    MLA slices them at the first request of the prefill path, and only if there is one.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    metadata: Any
    exact: torch.Tensor | None = None

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """The bounds, or exact lengths, of these requests: a plain tensor."""
        bounds: torch.Tensor = super().__getitem__(rows).as_subclass(torch.Tensor)
        if not isinstance(rows, slice) or not _has_drafts(self.metadata, rows):
            return bounds
        self.exact = _exact(self.metadata) if self.exact is None else self.exact
        return self.exact[rows]


def _has_drafts(metadata: Any, rows: slice) -> bool:
    """Whether some request among these rows may be shorter than its bound."""
    scheduled = query_lens(metadata.query_start_loc_cpu)[rows] > 0
    if metadata.is_prefilling is not None:
        scheduled &= ~metadata.is_prefilling[rows][: scheduled.shape[0]]
    return bool(scheduled.any())


def _exact(metadata: Any) -> torch.Tensor:
    """(batch,) int32, host: exact lengths, fetched by a counted wait where they are not known."""
    given: torch.Tensor | None = getattr(metadata, "_seq_lens_cpu", None)
    if given is not None:
        return given
    record_fallback("MLA drafts on the prefill path")
    return HostCopy(metadata.seq_lens, "seq_lens").read()


IMPLEMENTATIONS = {
    "mla-prefill-lengths": Implementation(_unneeded, functools.partial(_apply, "MLACommonMetadataBuilder")),
    "mla-prefill-lengths-sparse": Implementation(
        _unneeded, functools.partial(_apply, "SparseMLACommonMetadataBuilder"), _no_sparse
    ),
}
