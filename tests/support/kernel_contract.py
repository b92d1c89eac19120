"""FlashAttention's contract, written down a second time: one request, one head, one query token at a time.

Slow on purpose and independent of the package: it follows flash-attn's README and docstrings.
"""

import math

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor,
    causal: bool,
    window_size: tuple[int, int] | list[int],
    num_splits: int = 0,
) -> torch.Tensor:
    assert (cu_seqlens_k is None) != (seqused_k is None)
    lengths = seqused_k if cu_seqlens_k is None else cu_seqlens_k.diff()
    assert num_splits >= 0
    starts = cu_seqlens_q.tolist()
    out = torch.zeros_like(q)
    for row, keys in enumerate(lengths.tolist()):
        first, end = starts[row], starts[row + 1]
        assert end - first <= max_seqlen_q
        assert keys <= max_seqlen_k, "the grid would not reach the last keys"
        out[first:end] = _one_request(q[first:end], k, v, keys, block_table[row], causal, tuple(window_size))
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
    block_table: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> torch.Tensor:
    table = block_table if page_table is None else page_table
    if cu_seqlens_q is None:  # FlashAttention 2: (batch, tokens, heads, size)
        rows = [
            _one_request(q[row], k_cache, v_cache, keys, table[row], causal, window_size)
            for row, keys in enumerate(cache_seqlens.tolist())
        ]
        return torch.stack(rows)
    return flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=int(cache_seqlens.max()),
        seqused_k=cache_seqlens,
        block_table=table,
        causal=causal,
        window_size=window_size,
    )


def _one_request(q, k_cache, v_cache, keys, pages, causal, window):
    page_size = k_cache.shape[1]
    out = torch.zeros_like(q)
    back, ahead = window
    for i in range(q.shape[0]):
        at = keys - q.shape[0] + i  # causal masks are aligned to the bottom right
        first = 0 if back < 0 else max(0, at - back)
        last = at if causal else (keys - 1 if ahead < 0 else min(keys - 1, at + ahead))
        slots = [(int(pages[j // page_size]), j % page_size) for j in range(first, last + 1)]
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k_cache.shape[2])
            ks = torch.stack([k_cache[page, slot, kv] for page, slot in slots])
            vs = torch.stack([v_cache[page, slot, kv] for page, slot in slots])
            weights = torch.softmax(ks @ q[i, head] / math.sqrt(q.shape[2]), dim=0)
            out[i, head] = weights @ vs
    return out
