"""Drafts and prompts in one call of FlashInfer's on Hopper, as long as both are short.

XQA has no prompts, and FlashAttention 3 has no drafts that it is fast at, so vLLM calls both for a batch of both, in
each layer. No CUDA graph holds such a batch: its kernels are launched one by one, and where it is short, that is what
takes the time. FlashAttention 2 has drafts and prompts at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_async_spec.attention.flashinfer import split_bytes_outside_graphs
from vllm_async_spec.vllm_plugin.log import inform

MOST_WORK = 1 << 19
"""Query tokens times keys, summed over the requests: a prompt of 512 tokens, and 32 requests with three drafts and
2,000 keys each. For those drafts FlashAttention 2 takes an H200 some 30 µs a layer more than XQA, and more with longer
ones. The host is held up longer by a second call: mixed steps of an 8b took 17 ms with one, and 20 with vLLM's two."""

_NO_ROTATION = 0
"""`PosEncodingMode.NONE`: vLLM rotates keys and queries itself."""


class MixedWrapper:
    """The wrapper for such batches, and which they are.

    Args:
        builder: vLLM's metadata builder.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._most_drafts: int = builder.vllm_config.speculative_config.num_speculative_tokens
        self._wrapper: Any = None
        self._has_room, self._warm = True, False

    def takes(self, metadata: Any) -> bool:
        """Whether this is a batch of drafts, or single tokens, and of prompts, and short enough.

        Never the first of them: that is vLLM's warm-up, which is there to load what long prompts need.

        Args:
            metadata: vLLM's common metadata.
        """
        bound, most = metadata.seq_lens_cpu_upper_bound, 1 + self._most_drafts
        if bound is None or not metadata.causal or metadata.max_query_len <= most or not self._has_room:
            return False
        query_lens = np.diff(metadata.query_start_loc_cpu.numpy()).astype(np.int64)
        if query_lens.min() > most or query_lens @ bound.numpy() > MOST_WORK:
            return False
        warm, self._warm = self._warm, True
        return warm

    def of(self, metadata: Any, make: Callable[[], Any]) -> Any:
        """The wrapper for a batch that `takes` says yes to; vLLM's own where its workspace is too small for ours.

        Args:
            metadata: as there.
            make: makes vLLM's own wrapper for prefills, whose kind, layout and workspace this one has too.
        """
        if self._wrapper is None:
            like = make()
            builder = self._builder
            needed = split_bytes_outside_graphs(
                builder.num_qo_heads, builder.num_kv_heads, builder.head_dim, builder.device
            )
            self._has_room = needed <= like._float_workspace_buffer.nbytes
            if not self._has_room:
                return like
            self._wrapper = type(like)(like._float_workspace_buffer, like._kv_layout, backend="fa2")
        return self._wrapper


def load_flash_attention_2(builder: Any) -> None:
    """Load the kernels that a plan with `builder`'s heads and dtypes would load later, inside a request.

    Args:
        builder: vLLM's metadata builder.

    Raises:
        RuntimeError: the compiler failed; FlashInfer's message.
    """
    # Up to 0.24 queries of prompts and of decodes have one dtype.
    query = builder.q_data_type_prefill if hasattr(builder, "q_data_type_prefill") else builder.q_data_type
    dtypes = query, builder.kv_cache_dtype, builder.model_config.dtype, torch.int32
    heads = builder.head_dim, builder.head_dim
    _load(*dtypes, *heads, _NO_ROTATION, builder.window_left >= 0, (builder.logits_soft_cap or 0) > 0, False)


@functools.cache
def _load(*shape: Any) -> None:
    from flashinfer.prefill import get_batch_prefill_module

    inform("vllm-async-spec: loading FlashInfer's FlashAttention 2, which is compiled once for a machine")
    get_batch_prefill_module("fa2", *shape)
