"""Inputs of a decode step with a static cache, derived from those of the previous step (docs/generation.md).

Only three things change between decode steps: the token, its position, and one place of the mask, which the cache
itself counts on the device. So transformers prepares the first decode step, and later steps renew these three: the
same values, shapes and strides.

This is exact only if each layer keeps and attends to all tokens, and only transformers' own code prepares inputs.
Otherwise, and once any other argument changes between two steps, inputs are prepared as usual.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Cache, GenerationMixin, StaticCache
from transformers.cache_utils import StaticLayer

from vllm_async_spec.generation.cache_argument import CACHE
from vllm_async_spec.generation.method_patching import has_own, replaced

_PREPARE, _UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_RENEWED = (CACHE, "attention_mask", "position_ids", "inputs_embeds")
"""Arguments of a step that `_Steps._others` leaves out; embeddings belong to the prompt only."""
_CONSTANTS = (bool, int, float, str, type(None))


@contextlib.contextmanager
def reused_inputs(model: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Derive the inputs of decode steps from the previous step and the arguments of `_sample`, where that is exact."""
    cache = kwargs.get(CACHE)
    if not (_has_full_static_cache(cache) and _is_transformers_own(model) and _attends_to_all(model.config)):
        yield
        return
    _generations[id(cache)] = _Steps(cache)
    try:
        with replaced(model, _PREPARE, _preparing), replaced(model, _UPDATE, _updating):
            yield
    finally:
        del _generations[id(cache)]


class _Steps:
    """The decode steps of one generation."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._first: dict[str, Any] | None = None
        """Inputs of the first decode step, once prepared."""
        self._others: dict[str, Any] = {}
        """The other arguments of that step: while these stay the same, so do the inputs derived from them."""
        self._masks: Any = None
        """A `_Mask`, or one for each layer type."""
        self._is_over = False
        """Whether all further inputs are prepared as usual."""
        self._behind = 0
        """Tokens by which the padding mask must still be extended."""

    def prepare(self, stock: Callable[..., dict[str, Any]], input_ids: torch.Tensor, kwargs: Any) -> dict[str, Any]:
        """The inputs of a step; `stock` prepares them as usual."""
        if self._first is not None and not self._is_over:
            if self._are_the_same(kwargs):
                return self._renewed(self._first, input_ids, kwargs.get("position_ids"))
            self._is_over = True
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = _continued(kwargs["attention_mask"], self._behind)
        inputs = stock(input_ids, **kwargs)
        if kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration"):
            self._learn(inputs, kwargs)
        return inputs

    def update(self, stock: Callable[..., dict[str, Any]], outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the next step, after a step; `stock` is transformers' own update."""
        if self._first is None or self._is_over:
            return stock(outputs, kwargs)
        positions, mask = kwargs.pop("position_ids", None), kwargs.pop("attention_mask", None)
        kwargs = stock(outputs, kwargs)
        self._behind += 1
        if kwargs[CACHE] is not self._cache:  # then no later call reaches this object
            mask = None if mask is None else _continued(mask, self._behind)
        if positions is not None:
            kwargs["position_ids"] = positions[..., -1:] + 1
        if mask is not None:
            kwargs["attention_mask"] = mask
        return kwargs

    def _learn(self, inputs: dict[str, Any], kwargs: dict[str, Any]) -> None:
        if self._is_over or self._first is not None:
            return
        self._others = _unchanging(kwargs)
        padding, mask = kwargs.get("attention_mask"), inputs.get("attention_mask")
        length = self._cache.get_seq_length()
        if (
            all(type(each) in _CONSTANTS for each in self._others.values())
            and (padding is None or padding.ndim == 2)
            and all(map(_Mask.is_one, mask.values() if isinstance(mask, dict) else [mask]))
            and type(length) is torch.Tensor
            and length.device == inputs["input_ids"].device
        ):
            self._first = inputs
            self._masks = _by_layer_type(mask, lambda each: _Mask(each, length))
        else:
            self._is_over = True

    def _are_the_same(self, kwargs: dict[str, Any]) -> bool:
        others = _unchanging(kwargs)
        return all(type(each) in _CONSTANTS for each in others.values()) and others == self._others

    def _renewed(
        self, first: dict[str, Any], input_ids: torch.Tensor, positions: torch.Tensor | None
    ) -> dict[str, Any]:
        length = self._cache.get_seq_length()
        inputs = {**first, "input_ids": input_ids[:, -1:].clone(memory_format=torch.contiguous_format)}
        if positions is not None:
            inputs["position_ids"] = positions
        inputs["attention_mask"] = _by_layer_type(self._masks, lambda each: each.up_to(length))
        return inputs


def _continued(mask: torch.Tensor, by: int) -> torch.Tensor:
    """The padding mask, (batch, length), extended by `by` tokens."""
    return torch.cat([mask, mask.new_ones((len(mask), by))], dim=-1) if by else mask


def _unchanging(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in kwargs.items() if name not in _RENEWED}


def _by_layer_type(masks: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to one mask, or to the mask of each layer type."""
    return {name: change(each) for name, each in masks.items()} if isinstance(masks, dict) else change(masks)


class _Mask:
    """The mask of a decode step, stored as the first step that attends to each place of a static cache.

    Made of the first decode step's mask, bool (batch, 1, 1, places), and its token's place, () int64, device.
    """

    def __init__(self, mask: torch.Tensor, length: torch.Tensor) -> None:
        places = torch.arange(mask.shape[-1], device=mask.device)
        # Places after that token are masked only until they are written. Masked places before it are padding.
        self._from = torch.where(mask | (places > length), places, torch.iinfo(torch.int64).max)
        """int64 (batch, 1, 1, places): the token's place in the first step that attends to each place."""
        self._stride = mask.stride()

    @staticmethod
    def is_one(mask: Any) -> bool:
        """Whether a mask has the form that this class can extend."""
        return type(mask) is torch.Tensor and mask.dtype is torch.bool and mask.ndim == 4 and mask.shape[1:3] == (1, 1)

    def up_to(self, length: torch.Tensor) -> torch.Tensor:
        """The mask of the step whose token goes to place `length`; bool (batch, 1, 1, places)."""
        mask = self._from <= length
        return mask if mask.stride() == self._stride else mask.as_strided(mask.shape, self._stride)


_generations: dict[int, _Steps] = {}
"""Keyed by the id of the cache, which belongs to one generation: other threads may use the same model."""


def _preparing(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(stock)
    def prepare(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        steps = None if args else _generations.get(id(kwargs.get(CACHE)))
        return stock(input_ids, *args, **kwargs) if steps is None else steps.prepare(stock, input_ids, kwargs)

    return prepare


def _updating(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(stock)
    def update(outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest = functools.partial(_with, stock, args, kwargs)
        steps = _generations.get(id(model_kwargs.get(CACHE)))
        return rest(outputs, model_kwargs) if steps is None else steps.update(rest, outputs, model_kwargs)

    return update


def _with(stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *first: Any) -> Any:
    return stock(*first, *args, **kwargs)


def _has_full_static_cache(cache: Any) -> bool:
    return (
        type(cache) is StaticCache
        and not cache.offloading
        and all(type(layer) is StaticLayer for layer in cache.layers)
    )


def _is_transformers_own(model: Any) -> bool:
    """Whether only transformers 5's own code for all models prepares a step."""
    return not (
        hasattr(model, "_get_initial_cache_position")  # 4.57
        or model.config.is_encoder_decoder
        or model.is_remote_code()
        or hasattr(model, "create_masks_for_generate")
        or any(has_own(model, name) or not _is_mixins(type(model), name) for name in (_PREPARE, _UPDATE))
    )


def _is_mixins(model: type, name: str) -> bool:
    method = getattr(model, name)
    return method is getattr(GenerationMixin, name) and all(map(_is_of_transformers, _wrapped(method)))


def _wrapped(function: Any) -> Iterator[Any]:
    """A function, and what its decorators wrap: transformers 5.24 renames arguments in one."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_of_transformers(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and Path(transformers.__file__).parent in Path(code.co_filename).parents


def _attends_to_all(config: Any) -> bool:
    """Whether transformers' own `sdpa` function makes the masks, and each token attends to all tokens before it."""
    from transformers import masking_utils

    text = config.get_text_config()
    if text._attn_implementation != "sdpa" or not getattr(text, "is_causal", True):
        return False
    if masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not masking_utils.sdpa_mask:
        return False
    if hasattr(text, "layer_types"):
        return set(text.layer_types) == {"full_attention"}
    return getattr(text, "sliding_window", None) is None and getattr(text, "attention_chunk_size", None) is None
