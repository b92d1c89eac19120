"""Attention of every layer, called through transformers' registry of attention functions.

The model is unchanged and calls the function that its configuration names. That function asks the current worker. A
`Probe` records the shapes of the layers. A `Forward` writes to the cache and attends over its pages. In a compiled
model the function is an operator that asks the worker at run time. The compiler sees only its inputs and outputs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from vllm_async_spec.generation.batching.paged_cache import LayerShape, PagedCache

IMPLEMENTATION = "vllm_async_spec_paged"
"""The name in transformers' registry."""

Attend = Callable[[LayerShape, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a layer's shape, query (tokens, heads, head size) and pages of keys and values to (tokens, heads, head size)."""


class ModelError(ValueError):
    """The model can't be batched continuously; the message says why."""


class _Worker(Protocol):
    def layer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        """Attention of one layer; takes (1, heads, tokens, head size), returns (1, tokens, heads, head size)."""
        ...


_at_work: contextvars.ContextVar[_Worker | None] = contextvars.ContextVar("_at_work", default=None)


@contextlib.contextmanager
def at_work(worker: _Worker) -> Iterator[None]:
    """Let `worker` compute the attention of model calls in the block."""
    token = _at_work.set(worker)
    try:
        yield
    finally:
        _at_work.reset(token)


def paged_attention_of_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function in transformers' registry.

    Raises:
        RuntimeError: a model that belongs to a batcher was called from outside the batcher.
    """
    if torch.compiler.is_compiling():
        return _attend_in_layer(query, key, value, module.layer_idx), None
    return _worker().layer(module, query, key, value, attention_mask=attention_mask, **options), None


def _worker() -> Any:
    worker = _at_work.get()
    if worker is None:
        raise RuntimeError("this model belongs to a ContinuousBatcher; call the batcher's close() to use it elsewhere")
    return worker


# It mutates no argument: the cache is not an argument, and only this operator reads it.
@torch.library.custom_op("vllm_async_spec::attend_in_layer", mutates_args=())
def _attend_in_layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    attended: torch.Tensor = _worker().attend_in(layer, query, key, value)
    return attended


@_attend_in_layer.register_fake
def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    batch, heads, tokens, head_size = query.shape
    return query.new_empty(batch, tokens, heads, head_size)


AttentionInterface.register(IMPLEMENTATION, paged_attention_of_layer)


@dataclass(frozen=True, slots=True)
class Forward:
    """One call of the model: where its keys and values are written, and how it attends."""

    cache: PagedCache
    slot_mapping: torch.Tensor
    """(tokens,) int64, device."""
    attend: Attend

    def layer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        """See `_Worker`."""
        return self.attend_in(module.layer_idx, query, key, value)

    def attend_in(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As `layer`, for the layer with this index."""
        self.cache.write(index, self.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = self.cache.pages(index)
        attended = self.attend(self.cache.layers[index], query[0].transpose(0, 1).contiguous(), keys, values)
        return attended[None]


class Probe:
    """Records the shapes of the layers during one call of the model, in which each token attends only to itself.

    The call has two tokens: with one, transformers 4.57 reports some decoders as not causal.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def layer(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """See `_Worker`.

        Raises:
            ModelError: a layer attends in a way that no adapter does.
        """
        name = type(module).__name__
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise ModelError(
                f"{name} has layer_idx {index!r}, which is not a unique number; layers would share keys and values"
            )
        if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
            raise ModelError(f"{name} is not causal; only decoders can be batched")
        if attention_mask is not None and not _is_causal(attention_mask):
            raise ModelError(
                f"{name} attends with a mask or bias of its own, which no adapter supports; use model.generate"
            )
        for option in ("softcap", "s_aux", "position_bias"):
            if options.get(option) is not None:
                raise ModelError(f"{name} attends with {option}, which no adapter supports; use model.generate")
        if key.shape != value.shape:
            raise ModelError(
                f"{name} has keys of {key.shape[-1]} and values of {value.shape[-1]}; adapters need the same size"
            )
        self.layers[index] = LayerShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[-1],
            dtype=key.dtype,
            scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            sliding_window=sliding_window,
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask, (batch, heads, queries, keys) and added to the scores, only hides later tokens."""
    visible = torch.ones_like(mask, dtype=torch.bool).tril()
    return bool(torch.where(visible, mask == 0, mask <= -1e4).all())
