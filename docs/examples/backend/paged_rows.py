"""The metadata of an attention backend that lives outside vLLM's tree: rows of pages, planned on the host.

The kernel wants to know how many pages it has to walk, so that it can size its grid. A bound of that is enough, and
`PagedRowsMetadataBuilder` takes it from `seq_lens_cpu_upper_bound`. `WaitingMetadataBuilder` is how it began: it asks
the device, and the host waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class PagedRowsMetadata:
    """What the kernel is launched with."""

    seq_lens: torch.Tensor
    """(batch,) int32, device: exact."""
    page_indptr: torch.Tensor
    """(batch + 1,) int32, device: where the pages of each request begin; exact."""
    block_table: torch.Tensor
    grid: int
    """At least as many as there are pages."""


class PagedRowsMetadataBuilder(AttentionMetadataBuilder[PagedRowsMetadata]):
    """Plans from the bound; what the kernel masks by is the device's."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedRowsMetadata:
        common = common_attn_metadata
        pages = (common.seq_lens + self.page_size - 1) // self.page_size
        indptr = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        return PagedRowsMetadata(common.seq_lens, indptr, common.block_table_tensor, self.count_pages(common, indptr))

    def count_pages(self, common: CommonAttentionMetadata, indptr: torch.Tensor) -> int:
        """A bound of the pages of the batch, from what the host knows."""
        bound = common.seq_lens_cpu_upper_bound
        assert bound is not None
        return int(((bound + self.page_size - 1) // self.page_size).sum())


class WaitingMetadataBuilder(PagedRowsMetadataBuilder):
    """Asks the device."""

    def count_pages(self, common: CommonAttentionMetadata, indptr: torch.Tensor) -> int:
        """The pages of the batch, for which the host waits."""
        return int(indptr[-1].item())
