"""Keys and values of all layers in pages, and the shape of a layer's attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_async_spec.generation.batching.request import BatcherError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The constant properties of a layer's attention. Layers of one shape share their plans."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float
    """Factor on the logits."""
    sliding_window: int | None
    """How many tokens back, itself included, a token sees; None means all."""


class PagedCache:
    """Pages of keys and of values, each (pages, page size, KV heads, head size), for every layer, by its index.

    Pages start as zeros: a kernel may multiply values past a sequence's end by zero, and zero times NaN is NaN.
    """

    def __init__(
        self, layers: Mapping[int, LayerShape], *, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.layers = layers
        self.page_size = page_size
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, layer in layers.items():
            shape = (num_pages, page_size, layer.num_kv_heads, layer.head_size)
            self._pages[index] = (
                torch.zeros(shape, dtype=layer.dtype, device=device),
                torch.zeros(shape, dtype=layer.dtype, device=device),
            )

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (pages, page size, KV heads, head size)."""
        return self._pages[layer]

    def write(self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the keys and values of a step's tokens, each (tokens, KV heads, head size).

        `slot_mapping` is (tokens,) int64, device. Several padding rows may share a slot.
        """
        for pages, tokens in zip(self._pages[layer], (key, value), strict=True):
            pages.flatten(0, 1).index_copy_(0, slot_mapping, tokens)


def cache_of(layers: Mapping[int, LayerShape], num_pages: int, page_size: int, device: torch.device) -> PagedCache:
    """Allocate the cache on the device.

    Raises:
        BatcherError: the device's memory is too small.
    """
    try:
        with torch.inference_mode():
            return PagedCache(layers, num_pages=num_pages, page_size=page_size, device=device)
    except torch.OutOfMemoryError as error:
        raise BatcherError(
            f"a KV cache of {num_pages * page_size} tokens does not fit into the device's memory; give smaller "
            f"cache_tokens, max_length or max_batch: {error}"
        ) from error
