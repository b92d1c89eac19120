"""A static cache that keeps every token of every layer, and knows its length on the device alone."""

from __future__ import annotations

from typing import Any

from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer


def full_static_cache(model: Any, tokens: int) -> StaticCache:
    """A cache of transformers for `tokens` tokens a row, whose steps can be captured.

    transformers' own static layer of a sliding window decides on the host, by a length that it counts there, what a
    step does. A captured step would repeat one decision for ever. Here such a layer keeps all tokens like any other,
    and the mask alone makes the window. It costs the memory of the tokens that the window has passed.

    Raises:
        ValueError: the model has a layer of another kind, such as a recurrent one.
    """
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)
    for place, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ValueError(
                f"the static cache of {type(model).__name__} has a {type(layer).__name__}, which keeps more than keys "
                "and values; pass static_cache=False"
            )
        cache.layers[place] = StaticLayer(max_cache_len=tokens)
    return cache


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that the cache has allocated."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
