"""The models that a batcher calls, and that nobody else may call meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from vllm_async_spec.generation.batching.attention_function import IMPLEMENTATION, ModelError
from vllm_async_spec.generation.batching.model_check import check_attention

_OWNED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models of all batchers."""


class OwnedModels:
    """Makes models attend through this package's function, until they are given back."""

    def __init__(self) -> None:
        self._models: list[Any] = []
        self._attention_before: list[tuple[Any, str]] = []
        """Each configuration in the models, before its parts, and the name of its previous attention."""

    def take(self, model: Any) -> None:
        """Change the model's attention.

        Raises:
            ModelError: a batcher owns the model or its configuration, or the model can't attend through a function.
        """
        check_attention(model)
        name = type(model).__name__
        if model in _OWNED:
            raise ModelError(f"this {name} belongs to a ContinuousBatcher; close that batcher first")
        if any(each._attn_implementation == IMPLEMENTATION for each in _configurations(model)):
            raise ModelError(
                f"the configuration of this {name} is shared with a model of a ContinuousBatcher, or copied from one; "
                "build the model from a copy.deepcopy of its configuration, or give a copied model its attention back "
                "with set_attn_implementation"
            )
        before = [(each, each._attn_implementation) for each in _configurations(model)]
        self._attention_before += before
        self._models.append(model)
        _OWNED.add(model)
        model.set_attn_implementation(IMPLEMENTATION)

    def give_back(self) -> None:
        """Restore the attention of all models."""
        for configuration, attention in self._attention_before:
            configuration._attn_implementation = attention  # of its parts too, which come later
        for model in self._models:
            _OWNED.discard(model)
        self._attention_before.clear()
        self._models.clear()


def _configurations(model: Any) -> Iterator[Any]:
    found = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for each in found:
        yield each
        found += [part for name in each.sub_configs if (part := getattr(each, name, None)) is not None]
