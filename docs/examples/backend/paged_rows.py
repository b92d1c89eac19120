"""An attention backend that lives outside vLLM's tree, in plain PyTorch, and never makes the host wait.

Copy the file, and replace `forward` by a call of your kernel. Sizes come from what the host knows: `max_seq_len`, which
is an upper bound, and `query_start_loc_cpu`. What masks comes from the device: `seq_lens` and `query_start_loc`.

`WaitingMetadataBuilder` is how the builder began: it asks the device for a size, and the host waits.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)


@dataclass
class PagedRowsMetadata:
    """What one step's attention needs; the same for all layers."""

    seq_lens: torch.Tensor
    """(batch,) int32, device: exact."""
    block_table: torch.Tensor
    """(batch, pages) int32, device, cut to the pages that a request may have."""
    row: torch.Tensor
    """(tokens,) int64, device: the request of each query token."""
    column: torch.Tensor
    """(tokens,) int64, device: the place of each query token among its request's."""
    query_lens: torch.Tensor
    """(batch,) int32, device."""
    max_query_len: int
    """At least as long as any request's query."""


class PagedRowsMetadataBuilder(AttentionMetadataBuilder[PagedRowsMetadata]):
    """Takes sizes from the host's bound, and all that masks from the device."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedRowsMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc
        # num_actual_tokens may count padding, so the number of tokens is the host's last offset.
        token = torch.arange(int(common.query_start_loc_cpu[-1]), device=starts.device)
        row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        return PagedRowsMetadata(
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor[:, : self.count_pages(common)],
            row=row,
            column=token - starts[row],
            query_lens=starts.diff(),
            max_query_len=common.max_query_len,
        )

    def count_pages(self, common: CommonAttentionMetadata) -> int:
        """Pages of the longest request, or more: `max_seq_len` is a bound."""
        return -(-common.max_seq_len // self.page_size)


class WaitingMetadataBuilder(PagedRowsMetadataBuilder):
    """Asks the device for the longest request."""

    def count_pages(self, common: CommonAttentionMetadata) -> int:
        """Pages of the longest request, for which the host waits."""
        return -(-int(common.seq_lens.max().item()) // self.page_size)


class PagedRowsImpl(AttentionImpl[PagedRowsMetadata]):
    """One layer's attention: causal, over a KV cache of pages (pages, KV heads, page size, key and value)."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        wanted = (alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name)
        if any(wanted) or attn_type != AttentionType.DECODER:
            raise NotImplementedError("paged_rows has plain causal attention only; choose another attention backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values, (tokens, KV heads, head size) each, to their slots.

        Padding has slot -1. A boolean index would make the host wait, so padding goes to page 0, which vLLM gives to
        no request.
        """
        slot, page_size = slot_mapping.clamp(min=0), kv_cache.shape[2]
        both = torch.cat([key, value], dim=-1)[: len(slot)]
        kv_cache[slot // page_size, :, slot % page_size] = both.to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedRowsMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: `query` and `output` are (tokens, heads, head size), padding included."""
        if attn_metadata is None:  # while vLLM measures memory
            return output.zero_()
        m, tokens = attn_metadata, len(attn_metadata.row)
        queries = query.new_zeros(len(m.seq_lens), m.max_query_len, *query.shape[1:])
        queries[m.row, m.column] = query[:tokens]
        # (batch, pages, KV heads, page size, 2 * head size) to (batch, KV heads, keys, 2 * head size)
        pages = kv_cache[m.block_table].transpose(1, 2).flatten(2, 3)
        keys, values = pages.to(query.dtype).split(self.head_size, dim=-1)
        # A query token sees the keys up to its own; both lengths are the device's.
        computed = (m.seq_lens - m.query_lens)[:, None]
        last = computed + torch.arange(m.max_query_len, device=query.device)
        seen = torch.arange(keys.shape[2], device=query.device) <= last[:, :, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, attn_mask=seen[:, None], scale=self.scale, enable_gqa=True
        )
        output[:tokens] = attended.transpose(1, 2)[m.row, m.column]
        return output


class PagedRowsBackend(AttentionBackend):
    """What vLLM is told of the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up among AttentionBackendEnum's names, and refuses any other

    @staticmethod
    def get_impl_cls() -> type[PagedRowsImpl]:
        return PagedRowsImpl

    @staticmethod
    def get_builder_cls() -> type[PagedRowsMetadataBuilder]:
        return PagedRowsMetadataBuilder


def register() -> None:
    """The entry point, which vLLM calls in each of its processes: makes `--attention-backend CUSTOM` this backend."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "paged_rows.PagedRowsBackend")
    if current_platform.is_cpu():  # where vLLM takes no backend but CPU_ATTN, so this one takes its place
        register_backend(AttentionBackendEnum.CPU_ATTN, "paged_rows.PagedRowsBackend")
