"""Gives vLLM's MLA the exact lengths of requests with drafts on the prefill path.

MLA's builders split a batch by query length. Requests that the decode kernel can't take go to the prefill path, drafts
too. There the host cuts each context into chunks, from `seq_lens_cpu_upper_bound`. This bound is exact for prefills.
Under asynchronous scheduling it counts rejected drafts, so a request attends to slots without keys of its own. So the
patch fetches exact lengths if a request with drafts is on the prefill path: one wait, counted as a fallback.
"""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.host_copy import HostCopy
from vllm_async_spec.host_lengths import query_lens
from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_batch import CommonMetadata, MLABuilder

_SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"


def _apply(builder_name: str, transaction: Transaction, module: ModuleType) -> None:
    builder = getattr(module, builder_name)
    original = builder.build

    @functools.wraps(original)
    def build(
        self: MLABuilder, common_prefix_len: int, common_attn_metadata: CommonMetadata, fast_build: bool = False
    ) -> object:
        bound = common_attn_metadata.seq_lens_cpu_upper_bound
        if bound is not None and self.vllm_config.speculative_config is not None:
            guarded = bound.as_subclass(_ExactForDrafts)
            guarded.metadata = common_attn_metadata
            common_attn_metadata = copy.copy(common_attn_metadata)
            common_attn_metadata.seq_lens_cpu_upper_bound = guarded
        return original(self, common_prefix_len, common_attn_metadata, fast_build)

    transaction.set(builder, "build", build)


class _ExactForDrafts(torch.Tensor):
    """Upper bounds whose slices are exact if they have a request past its prompt.

    MLA slices its bounds at the first request of the prefill path, and only if there is one.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    metadata: CommonMetadata
    exact: torch.Tensor | None = None

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """The bounds or exact lengths of these requests, as a plain tensor."""
        bounds: torch.Tensor = super().__getitem__(rows).as_subclass(torch.Tensor)
        if not isinstance(rows, slice) or not _has_drafts(self.metadata, rows):
            return bounds
        self.exact = _exact(self.metadata) if self.exact is None else self.exact
        return self.exact[rows]


def _has_drafts(metadata: CommonMetadata, rows: slice) -> bool:
    """Whether some request among these rows may be shorter than its bound."""
    scheduled = query_lens(metadata.query_start_loc_cpu)[rows] > 0
    if metadata.is_prefilling is not None:
        scheduled &= ~metadata.is_prefilling[rows][: scheduled.shape[0]]
    return bool(scheduled.any())


def _exact(metadata: CommonMetadata) -> torch.Tensor:
    """(batch,) int32, host: exact lengths, fetched with a counted wait if the host does not know them."""
    given: torch.Tensor | None = getattr(metadata, "_seq_lens_cpu", None)
    if given is not None:
        return given
    record_fallback("MLA drafts on the prefill path")
    return HostCopy(metadata.seq_lens, "seq_lens").read()


IMPLEMENTATIONS = {
    "mla-prefill-lengths": Implementation(functools.partial(_apply, "MLACommonMetadataBuilder")),
    "mla-prefill-lengths-sparse": Implementation(functools.partial(_apply, "SparseMLACommonMetadataBuilder")),
}
