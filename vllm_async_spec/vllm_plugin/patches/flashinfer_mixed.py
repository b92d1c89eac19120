"""Runs drafts and short prompts in one FlashInfer call on Hopper.

vLLM makes two calls per layer for such a batch, because XQA takes no prompts and FlashAttention 3 is slow for drafts.
No CUDA graph holds a mixed batch, so launches limit the speed of a short one. FlashAttention 2 takes both in one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_async_spec.attention.flashinfer import split_bytes_outside_graphs
from vllm_async_spec.vllm_plugin.log import inform

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import BatchMetadata
    from vllm_async_spec.vllm_plugin.upstream_flashinfer import FlashInferBuilderBase, PlannedWrapper

MOST_WORK = 1 << 19
"""Query tokens times keys, summed over the requests: a prompt of 512 tokens, and 32 requests with three drafts and
2,000 keys each.

On an H200, beside 32 requests of an 8b with 1,000 keys, a prompt of 128, 256, 512 and 1,024 tokens took 1.6, 4.4, 11.7
and 23.8 ms with one call a layer; with two 2.8, 5.1, 11.1 and 21.5. A step of over 512 tokens has no piecewise graph:
one call wins up to 9 ms if the host is slow, and loses 1 ms if not. Servers were as fast with 2^21 and 2^23.
"""

_NO_ROTATION = 0
"""`PosEncodingMode.NONE`: vLLM itself rotates keys and queries."""


class MixedWrapper:
    """The wrapper for short batches of drafts and prompts.

    Args:
        builder: vLLM's metadata builder.
    """

    def __init__(self, builder: FlashInferBuilderBase) -> None:
        self._builder = builder
        self._most_drafts: int = builder.vllm_config.speculative_config.num_speculative_tokens
        self._wrapper: PlannedWrapper | None = None
        self._has_room, self._warm = True, False

    def takes(self, metadata: BatchMetadata) -> bool:
        """Whether this is a short batch of prompts beside drafts or single tokens.

        The first such batch is always left to vLLM: it is vLLM's warm-up, which loads the kernels of long prompts.

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

    def of(self, metadata: BatchMetadata, make: Callable[[], PlannedWrapper]) -> PlannedWrapper:
        """The wrapper for a batch that `takes` accepts; vLLM's own where vLLM's workspace is too small for ours.

        Args:
            metadata: as in `takes`.
            make: makes vLLM's prefill wrapper, whose class, layout and workspace this wrapper shares.
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


def load_flash_attention_2(builder: FlashInferBuilderBase) -> None:
    """Load the FlashAttention 2 kernels for `builder`'s heads and dtypes now, and not during a request.

    Args:
        builder: vLLM's metadata builder.

    Raises:
        RuntimeError: the compiler failed; FlashInfer's message.
    """
    # Up to 0.24 the queries of prompts and decodes share one dtype.
    query = builder.q_data_type_prefill if hasattr(builder, "q_data_type_prefill") else builder.q_data_type
    dtypes = query, builder.kv_cache_dtype, builder.model_config.dtype, torch.int32
    heads = builder.head_dim, builder.head_dim
    _load(*dtypes, *heads, _NO_ROTATION, builder.window_left >= 0, (builder.logits_soft_cap or 0) > 0, False)


@functools.cache
def _load(*shape: object) -> None:
    from flashinfer.prefill import get_batch_prefill_module

    inform("vllm-async-spec: loading FlashInfer's FlashAttention 2 kernels; the first start on a machine compiles them")
    get_batch_prefill_module("fa2", *shape)
