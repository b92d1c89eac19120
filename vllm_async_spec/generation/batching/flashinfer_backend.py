"""FlashInfer: XQA or trtllm-gen for decodes, which need no plan, and the planned wrapper for prompts.

Prompts are planned from exact lengths, which the host knows. A plan reads the step's own host buffers, and fills one of
`PlanBuffers`. So a new plan does not overwrite the previous plan while that is still being copied.

Source: flashinfer-python 0.6.6, 0.6.14 and 0.7.0.post1: `xqa_batch_decode_with_kv_cache` and
`trtllm_batch_decode_with_kv_cache` of `decode.py`, `BatchPrefillWithPagedKVCacheWrapper` of `prefill.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from vllm_async_spec.attention import TrtllmAdapter, TrtllmShape, bmm_scales, decode_kernel
from vllm_async_spec.attention.flashinfer import PlanBuffers
from vllm_async_spec.attention.trtllm_shape import XQA
from vllm_async_spec.generation.batching.attention_function import Attend
from vllm_async_spec.generation.batching.paged_cache import LayerShape
from vllm_async_spec.generation.batching.step_slots import PrefillInputs
from vllm_async_spec.metadata import CommonAttentionMetadata

_LAYOUT = "NHD"
_DECODE_WORKSPACE = 128 << 20
_PREFILL_WORKSPACE = 384 << 20


class FlashInferBackend:
    """XQA or trtllm-gen for decodes, and one prefill wrapper for each layer shape.

    Args:
        layers: shapes of the model's layers.
        page_size: tokens in a page.
        slots: steps that may be planned before the first of them has run.
        device: a CUDA device.
        query_tokens: maximum tokens of a decode row.

    Raises:
        UnsupportedShapeError: the kernel does not take a shape, or this machine.
    """

    name = TrtllmAdapter.name

    def __init__(
        self,
        layers: Collection[LayerShape],
        page_size: int,
        slots: int,
        device: torch.device,
        query_tokens: int = 1,
    ) -> None:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        shapes = list(dict.fromkeys(layers))
        capability = torch.cuda.get_device_capability(device)
        self._page_size = page_size
        self._kernel = decode_kernel(capability)
        self._adapters = {
            layer: TrtllmAdapter(
                TrtllmShape(
                    kernel=self._kernel,
                    capability=capability,
                    page_size=page_size,
                    head_size=layer.head_size,
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    query_dtype=layer.dtype,
                    kv_dtype=layer.dtype,
                    query_tokens=query_tokens,
                    sliding_window=layer.sliding_window,
                    kv_layout=_LAYOUT,
                )
            )
            for layer in shapes
        }
        # XQA needs zeros before its first use.
        self._workspace = torch.zeros(_DECODE_WORKSPACE, dtype=torch.uint8, device=device)
        shared = torch.empty(_PREFILL_WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers = {layer: BatchPrefillWithPagedKVCacheWrapper(shared, _LAYOUT) for layer in shapes}
        nbytes = max(wrapper._pin_memory_int_workspace_buffer.nbytes for wrapper in self._wrappers.values())
        self._plans = PlanBuffers(slots * len(shapes) + 1, nbytes, device)

    def decode(self, metadata: CommonAttentionMetadata) -> Attend:
        """See `AttentionBackend`."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

        function = xqa_batch_decode_with_kv_cache if self._kernel == XQA else trtllm_batch_decode_with_kv_cache
        calls: dict[LayerShape, dict[str, Any]] = {}
        for layer, adapter in self._adapters.items():
            decode = adapter.arguments(metadata).decode
            assert decode is not None
            given = decode.xqa_batch_decode() if self._kernel == XQA else decode.trtllm_batch_decode()
            calls[layer] = given | bmm_scales(layer.scale)

        def attend(layer: LayerShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = function(
                query=query, kv_cache=(keys, values), workspace_buffer=self._workspace, **calls[layer]
            )
            return out.view(query.shape)

        return attend

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, device: PrefillInputs) -> Attend:
        """See `AttentionBackend`."""
        rows = metadata.num_reqs
        pages = int(host.page_indptr[rows])
        for layer, wrapper in self._wrappers.items():
            self._plans.lend(wrapper)
            wrapper.plan(
                host.query_start_loc[: rows + 1],
                host.page_indptr[: rows + 1],
                device.page_indices[:pages],
                host.last_page_len[:rows],
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_size,
                self._page_size,
                causal=True,
                sm_scale=layer.scale,
                window_left=-1 if layer.sliding_window is None else layer.sliding_window - 1,
                q_data_type=layer.dtype,
                kv_data_type=layer.dtype,
            )
            self._plans.planned()

        def attend(layer: LayerShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self._wrappers[layer].run(query, (keys, values))
            return out

        return attend
