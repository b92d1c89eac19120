"""A layer that attends as vLLM's `Attention` does: a backend's implementation, its KV cache, and what both ask for.

Nothing of it is made from vLLM's own layer, which wants a model, ranks and weights. What an implementation is given
here is what every release's gives it:

- its KV cache in the shape and the order of strides that the backend names, or that the release computes from the spec
  of the KV cache; of one layer, and not padded;
- scales of 1, as tensors on the device and as floats;
- keys by `do_kv_cache_update`, or by its `forward` where that writes them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import HEAD_SIZE, HEADS, KV_HEADS, LAYER, configured
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.layer import POISON, Batch, NoForwardError, blocks_of, random, reference

__all__ = ["ImplLayer", "Surround", "kv_cache", "layer_attributes"]

SCALE = HEAD_SIZE**-0.5

Surround = Callable[[], contextlib.AbstractContextManager[Any]]
"""What holds while an implementation is made."""


class ImplLayer:
    """One layer of a backend that has `get_impl_cls`.

    Args:
        backend: The backend class.
        builder: The builder whose metadata it will be given.
        device: Where it attends.
        block_size: Tokens in a block of its KV cache.
        encoder: Whether it attends to its own queries' keys only, in both directions.
        chunk: Tokens of a chunk of chunked local attention; None if a token sees all before it.
        last_only: Whether it is given the last token of each request only, as with KV-sharing fast prefill.
        surround: What holds while the implementation is made.

    Raises:
        NoForwardError: Nothing says what its KV cache looks like.
    """

    def __init__(
        self,
        backend: Any,
        builder: Any,
        device: Device,
        block_size: int,
        *,
        encoder: bool = False,
        chunk: int | None = None,
        last_only: bool = False,
        surround: Surround = contextlib.nullcontext,
    ) -> None:
        self._encoder, self._chunk, self._last_only, self._device = encoder, chunk, last_only, device
        with configured(builder), surround(), device.watching():
            self._cache = kv_cache(backend, builder, device, block_size, KV_HEADS, HEAD_SIZE)
            self._layer = layer_attributes(builder, device)
            self.impl = backend.get_impl_cls()(
                HEADS, HEAD_SIZE, SCALE, KV_HEADS, None, None, "auto", None, _attention_type(encoder), None
            )

    def fill(self, batch: Batch) -> None:
        """See `Layer`."""
        self._batch = batch
        count = len(batch.content)
        keys, values = (random(self._device, seed, count, KV_HEADS, HEAD_SIZE) for seed in (1, 2))
        self._keys, self._values = keys[batch.content], values[batch.content]
        self._query = random(self._device, 3, batch.tokens, HEADS, HEAD_SIZE)
        self._new_keys, self._new_values = batch.queries(self._keys), batch.queries(self._values)
        with self._device.watching():
            self._output = torch.zeros(batch.tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=self._device.device)
            self._cache.fill_(POISON)
        if self._encoder or len(batch.context) == 0:
            return
        if not hasattr(self.impl, "do_kv_cache_update"):
            raise NoForwardError("this release's forward writes keys of the step only, and its context can't be filled")
        keys, values = self._keys[batch.context], self._values[batch.context]
        self.impl.do_kv_cache_update(self._layer, keys, values, self._cache, batch.slots[batch.context])

    def attend(self, metadata: Any) -> torch.Tensor:
        """See `Layer`."""
        query, keys, values, output = self._query, self._new_keys, self._new_values, self._output
        if not self._encoder and hasattr(self.impl, "do_kv_cache_update"):
            self.impl.do_kv_cache_update(self._layer, keys, values, self._cache, self._batch.slot_mapping)
        if self._last_only:
            last = self._last()
            query, keys, values, output = query[last], keys[last], values[last], output[: len(last)]
        self.impl.forward(self._layer, query, keys, values, self._cache, metadata, output=output)
        return output if self._last_only else output[: len(self._batch.new)]

    def expected(self) -> torch.Tensor:
        """See `Layer`."""
        out = reference(
            self._batch,
            self._query,
            self._keys,
            self._values,
            scale=SCALE,
            causal=not self._encoder,
            chunk=self._chunk,
        )
        return out[self._last()] if self._last_only else out

    def _last(self) -> torch.Tensor:
        """The last query token of each request that is not padding."""
        ends: torch.Tensor = self._batch.query_start_loc[1 : self._batch.case.live + 1].long() - 1
        return ends


def kv_cache(
    backend: Any, builder: Any, device: Device, block_size: int, kv_heads: int, head_size: int
) -> torch.Tensor:
    """An uninitialised KV cache as the loaded release makes it for one layer, bfloat16.

    Args:
        backend: The backend class.
        builder: The builder, whose spec of the KV cache may say its shape.
        device: Where it lies; somebody watches it.
        block_size: Tokens in a block.
        kv_heads: KV heads.
        head_size: Width of a head.

    Raises:
        NoForwardError: Neither the backend nor vLLM says its shape.
    """
    blocks = blocks_of(block_size)
    if hasattr(backend, "get_kv_cache_shape"):
        shape = backend.get_kv_cache_shape(blocks, block_size, kv_heads, head_size)
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        return _permuted(shape, order, torch.bfloat16, device)
    interface: Any = sys.modules.get("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "compute_layer_kv_cache_shape_bytes"):
        raise NoForwardError("nothing says the shape of its KV cache")
    spec = backend.customize_spec(builder.kv_cache_spec)
    layouts = backend.supported_kv_cache_layouts()
    layout = (layouts or (interface.KVCacheLayout.LBNHC,))[0]
    shape = interface.compute_layer_kv_cache_shape_bytes(spec, blocks)
    return _permuted(shape, layout.layer_view_order, torch.int8, device).view(torch.bfloat16)


def _permuted(shape: Any, order: Any, dtype: torch.dtype, device: Device) -> torch.Tensor:
    memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device.device)
    return memory.permute(*(order.index(axis) for axis in range(len(order))))


def layer_attributes(builder: Any, device: Device) -> Any:
    """What implementations ask their layer for: scales of 1, its name, and the instructions that a builder chose."""
    one = device.place(torch.ones((), dtype=torch.float32))
    scales = {f"_{of}_scale": one for of in ("q", "k", "v", "prob")}
    floats = {f"_{of}_scale_float": 1.0 for of in ("q", "k", "v")}
    return SimpleNamespace(
        **scales,
        **floats,
        _o_scale_float=None,
        layer_name=LAYER,
        isa=getattr(builder, "isa", None),
        kv_cache_dtype="auto",
    )


def _attention_type(encoder: bool) -> Any:
    for module in ("vllm.v1.attention.backend", "vllm.attention.backends.abstract"):
        if "vllm" in sys.modules and importlib.util.find_spec(module) is not None:
            kinds = importlib.import_module(module).AttentionType
            return kinds.ENCODER_ONLY if encoder else kinds.DECODER
    return "encoder_only" if encoder else "decoder"
