"""FlashAttention 2 and 3 over a paged KV cache, from device `seq_lens`.

Sources: `flash_attn_varlen_func` and `flash_attn_with_kvcache` of flash-attn (2.7 and later; hopper/ for 3) and
vLLM's build of both, `vllm.vllm_flash_attn`. None of them reads a length on the host. Lengths by request are device
tensors. The two maxima only size the grid and choose the number of KV splits, so an upper bound is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.attention.base import HostNeed
from vllm_async_spec.metadata import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class FlashAttentionArguments:
    """One batch in FlashAttention's terms; each method returns the keyword arguments of one function."""

    cu_seqlens_q: torch.Tensor
    """(batch + 1,) int32, device: cumulative query lengths."""
    cu_seqlens_q_cpu: torch.Tensor
    """The same on the host."""
    seqused_k: torch.Tensor
    """(batch,) int32, device: exact number of keys of each request."""
    block_table: torch.Tensor
    """(batch, pages) int32, device, last dimension contiguous."""
    num_tokens: int
    """Query tokens, padding included."""
    max_seqlen_q: int
    max_seqlen_k: int
    """Upper bound of `seqused_k`."""
    causal: bool
    window_size: tuple[int, int]
    """Keys seen before and after a query token's own; -1 is no limit."""
    num_splits: int
    """KV splits; with 0 the kernel chooses the number from `max_seqlen_k`."""

    def vllm_varlen(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `flash_attn_varlen_func` (2 and 3), which takes key lengths as `seqused_k`."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.max_seqlen_q,
            "seqused_k": self.seqused_k,
            "max_seqlen_k": self.max_seqlen_k,
            "block_table": self.block_table,
            "causal": self.causal,
            "window_size": list(self.window_size),
            "num_splits": self.num_splits,
        }

    def varlen(self) -> dict[str, Any]:
        """Keyword arguments of flash-attn 2's `flash_attn_varlen_func`, which takes cumulative key lengths."""
        # Summed on the device. `pad` makes the leading zero, because a host scalar would be copied to the device.
        cumulative = torch.nn.functional.pad(self.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": cumulative,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
            "block_table": self.block_table,
            "causal": self.causal,
            "window_size": self.window_size,
        }

    def with_kvcache(self) -> dict[str, Any]:
        """Keyword arguments of flash-attn 2's `flash_attn_with_kvcache`.

        The query is (batch, `max_seqlen_q`, heads, head size), so every request must have `max_seqlen_q` query
        tokens, as in a decode or speculative batch, and padding rows as many padding tokens.

        Raises:
            ValueError: the batch is ragged.
        """
        starts = self.cu_seqlens_q_cpu
        begins = torch.arange(0, starts.shape[0], dtype=starts.dtype, device="cpu") * self.max_seqlen_q
        live = (starts < starts[-1]).sum()  # the first padding row begins where the last request ends
        if self.num_tokens != begins[-1] or not torch.equal(starts[: live + 1], begins[: live + 1]):
            raise ValueError(
                f"the batch has {self.num_tokens} query tokens, of which requests have {starts.diff().tolist()}; "
                f"flash_attn_with_kvcache needs {self.max_seqlen_q} for each, so use the arguments of varlen()"
            )
        return {
            "cache_seqlens": self.seqused_k,
            "block_table": self.block_table,
            "causal": self.causal,
            "window_size": self.window_size,
            "num_splits": self.num_splits,
        }

    def with_kvcache_3(self) -> dict[str, Any]:
        """Keyword arguments of FlashAttention 3's `flash_attn_with_kvcache`, whose query may be ragged."""
        return {
            "cache_seqlens": self.seqused_k,
            "page_table": self.block_table,
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.max_seqlen_q,
            "causal": self.causal,
            "window_size": self.window_size,
            "num_splits": self.num_splits,
        }


class FlashAttentionAdapter:
    """Arguments for FlashAttention 2 and 3.

    Args:
        sliding_window: how many tokens back, itself included, a token sees; all if None.
        num_splits: KV splits. With 0 the kernel chooses from the upper bound. Drafts in flight raise the bound, which
            may change the number of splits and so the order of summation. With 1, results are bitwise independent of
            the bound.

    Raises:
        ValueError: `sliding_window` is less than 1, or `num_splits` less than 0.
    """

    name = "FLASH_ATTN"
    host_need = HostNeed.NONE

    def __init__(self, *, sliding_window: int | None = None, num_splits: int = 0) -> None:
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for no window")
        if num_splits < 0:
            raise ValueError(f"num_splits is {num_splits}; it must be at least 0, where 0 lets the kernel choose")
        self.sliding_window = sliding_window
        self.num_splits = num_splits

    def arguments(self, metadata: CommonAttentionMetadata) -> FlashAttentionArguments:
        """The arguments for this batch: fields renamed, nothing computed or copied."""
        back = -1 if self.sliding_window is None else self.sliding_window - 1
        return FlashAttentionArguments(
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_q_cpu=metadata.query_start_loc_cpu,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table_tensor,
            num_tokens=metadata.num_actual_tokens,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            causal=metadata.causal,
            window_size=(back, 0 if metadata.causal and back >= 0 else back),
            num_splits=self.num_splits,
        )
