"""Paged attention in plain PyTorch, on any device: the reference for every other adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_async_spec.attention.base import HostNeed
from vllm_async_spec.host_lengths import query_lens
from vllm_async_spec.metadata import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class ReferenceArguments:
    """One batch for `paged_attention`."""

    query_start_loc: torch.Tensor
    """(batch + 1,) int32, device."""
    seq_lens: torch.Tensor
    """(batch,) int32, device."""
    block_table: torch.Tensor
    """(batch, pages) int32, device."""
    max_query_len: int
    max_seq_len: int
    """Upper bound of `seq_lens`: pages are gathered up to this length. Keys beyond the exact length are masked."""
    causal: bool


class ReferenceAdapter:
    """The PyTorch reference. Reads no lengths on the host, so it can also check a run without syncs."""

    name = "TORCH_REFERENCE"
    host_need = HostNeed.NONE

    def arguments(self, metadata: CommonAttentionMetadata) -> ReferenceArguments:
        """The arguments of `paged_attention` for this batch."""
        return ReferenceArguments(
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table_tensor,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            causal=metadata.causal,
        )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    arguments: ReferenceArguments,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of each request's query over its paged keys and values, gathered and given to PyTorch's SDPA.

    The last query token of a request is the last token of its sequence. If causal, a token sees no later token.

    Args:
        query: (tokens, query heads, head size) floating point; tokens beyond the last request are padding.
        key_cache: (pages in all, page size, KV heads, head size), same dtype; query heads are a multiple of KV heads.
        value_cache: like `key_cache`.
        arguments: the batch.
        scale: factor on the logits; 1 / sqrt(head size) if None.
        sliding_window: how many tokens back (and ahead, unless causal), itself included, a token sees; all if None.

    Returns:
        (tokens, query heads, head size) in the dtype of `query`; zeros for padding.
    """
    batch, page_size = arguments.seq_lens.shape[0], key_cache.shape[1]
    if batch == 0 or arguments.max_query_len == 0:
        return torch.zeros_like(query)
    device = query.device
    pages = -(-max(arguments.max_seq_len, 1) // page_size)
    # The table may be narrower than the upper bound needs; no exact length exceeds the table.
    table = arguments.block_table[:, :pages].long()
    keys = key_cache[table].flatten(1, 2)
    values = value_cache[table].flatten(1, 2)

    starts, lengths = arguments.query_start_loc[:-1, None].long(), query_lens(arguments.query_start_loc)[:, None]
    offset = torch.arange(arguments.max_query_len, device=device)[None, :]
    is_query = offset < lengths
    token = (starts + offset).clamp(max=query.shape[0] - 1)

    seq_lens = arguments.seq_lens[:, None].long()
    query_at = (seq_lens - lengths + offset)[:, :, None]
    key_at = torch.arange(keys.shape[1], device=device)[None, None, :]
    sees = (key_at < seq_lens[:, :, None]).expand(batch, offset.shape[1], -1)
    if arguments.causal:
        sees = sees & (key_at <= query_at)
    if sliding_window is not None:
        sees = sees & (key_at > query_at - sliding_window) & (key_at < query_at + sliding_window)
    # A row that sees no key gives NaN in the softmax. Padding rows therefore see all keys; their result is dropped.
    sees = sees | ~is_query[:, :, None]

    attended = torch.nn.functional.scaled_dot_product_attention(
        query[token].transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=sees[:, None],
        scale=scale,
        enable_gqa=query.shape[1] != key_cache.shape[2],
    ).transpose(1, 2)

    # Padding goes to one extra row, which is cut off: the index has a fixed size, while a boolean index would wait.
    out = query.new_zeros(query.shape[0] + 1, *query.shape[1:])
    target = torch.where(is_query, token, query.shape[0])
    return out.index_copy_(0, target.flatten(), attended.flatten(0, 1))[:-1]
