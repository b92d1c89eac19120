"""Transformers' preparation of a step: which transformers it is, and a model with another attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tiny_models
import transformers

HAS_POSITIONS = hasattr(transformers.GenerationMixin, "_get_initial_cache_position")  # 4.57


@contextlib.contextmanager
def attending(kind: str, attention: str) -> Iterator[Any]:
    """The model with another attention, and without what earlier calls left: a cache, a compiled forward."""
    model = tiny_models.model(kind)
    before = model.config._attn_implementation
    _forget(model)
    model.set_attn_implementation(attention)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)
        _forget(model)


def _forget(model: Any) -> None:
    for name in ("_cache", "_compiled_call", "_last_compile_config"):
        vars(model).pop(name, None)
