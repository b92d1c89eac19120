"""Finds what `model.generate` was given, but does not pass to a `custom_generate` function."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import utils

_LOST = ("streamer", "synced_gpus", "assistant_model")


@dataclass(frozen=True, slots=True)
class DroppedArguments:
    """What transformers keeps to itself of one call."""

    lost: dict[str, Any] = field(default_factory=dict)
    """The arguments that reach no `custom_generate` function, by name; those given, or set by transformers."""
    model_arguments: dict[str, Any] = field(default_factory=dict)
    """What the caller passed for the model. transformers 4.57 does not mark these arguments later."""


def dropped_arguments(model: Any) -> DroppedArguments:
    """The arguments of the `generate` call of transformers that runs now for `model`; none if none runs.

    Only the frame of `generate` holds these arguments: `generate` copies some names into the call of a
    `custom_generate` function, and no attribute, hook or signature tells the rest. Without the frame, a streamer would
    silently receive no tokens. The frame is found by its code, so functions between it and this package don't matter,
    nor does one that was put in the place of `generate` and calls it.
    """
    instead = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while not _is_generate(frame.f_code, instead) or frame.f_locals.get("self") is not model:
        if frame.f_back is None:
            return DroppedArguments()
        frame = frame.f_back
    given = frame.f_locals
    lost = {name: given[name] for name in _LOST if given.get(name) is not None}
    if not lost.setdefault("synced_gpus", _sets_synced_gpus(model)):
        lost.pop("synced_gpus")
    return DroppedArguments(lost, given.get("kwargs") or {})


def _is_generate(code: CodeType, instead: CodeType) -> bool:
    """Whether code is that of transformers' `generate`, or of what is in its place and may not call it."""
    return code is instead or (code.co_name == "generate" and code.co_filename == utils.__file__)


def _sets_synced_gpus(model: Any) -> bool:
    """Whether transformers sets `synced_gpus` by itself: the weights are spread over several ranks."""
    spread = _asked("is_deepspeed_zero3_enabled") or _asked("is_fsdp_managed_module", model)
    if not spread:
        return False
    # Release 4 asks PyTorch.
    ranks = getattr(utils, "_get_torch_distributed_world_size", None) or torch.distributed.get_world_size
    return bool(ranks() > 1)


def _asked(name: str, *args: Any) -> bool:
    """The answer of a function that `generate` asks; False in a release of transformers that has none of that name."""
    function = getattr(utils, name, None)
    return function is not None and bool(function(*args))
