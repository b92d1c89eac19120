"""What transformers prepares for a step: of which release, with which attention, and what the model is then given."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import tiny_models
import torch
import transformers

HAS_POSITIONS = hasattr(transformers.GenerationMixin, "_get_initial_cache_position")  # 4.57
PREPARE, UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
Kept = TypeVar("Kept")


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


def prompts(padding: str, batch: int) -> dict[str, torch.Tensor]:
    lengths = [4] * batch if padding == "full" else [4, 2, 3][:batch]
    return tiny_models.prompts(lengths, "left" if padding == "full" else padding)


Seen = dict[str, Any]


def shown(value: Any) -> Any:
    """A value of an input, so that two of them can be compared after a step has changed what it was given."""
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.stride(), value.tolist()
    return value if isinstance(value, bool | int | str | type(None)) else type(value)


@contextlib.contextmanager
def given_to_forward(model: Any, kept: Callable[[dict[str, Any]], Kept]) -> Iterator[list[Kept]]:
    steps: list[Kept] = []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: steps.append(kept(kwargs)), with_kwargs=True)
    try:
        yield steps
    finally:
        handle.remove()


@contextlib.contextmanager
def masks_made() -> Iterator[list[Any]]:
    from transformers.generation import utils

    made: list[Any] = []
    own = utils.create_masks_for_generate

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "create_masks_for_generate", noted)
        yield made
