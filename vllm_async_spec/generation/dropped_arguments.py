"""Finds what `model.generate` was given, but does not pass to a `custom_generate` function."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationMixin

_LOST = ("streamer", "synced_gpus", "assistant_model")


@dataclass(frozen=True, slots=True)
class DroppedArguments:
    """What transformers keeps to itself of one call."""

    lost: dict[str, Any] = field(default_factory=dict)
    """The arguments that reach no `custom_generate` function, by name; only those that were given."""
    model_arguments: dict[str, Any] = field(default_factory=dict)
    """What the caller passed for the model. transformers 4.57 does not mark these arguments later."""


def dropped_arguments(model: Any) -> DroppedArguments:
    """The arguments of the `generate` call of transformers that runs now for `model`; none if none runs.

    Only the frame of `generate` holds these arguments: `generate` copies some names into the call of a
    `custom_generate` function, and no attribute, hook or signature tells the rest. Without the frame, a streamer would
    silently receive no tokens. The frame is found by its code, so functions between it and this package don't matter.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame.f_code is not code or frame.f_locals.get("self") is not model:
        if frame.f_back is None:
            return DroppedArguments()
        frame = frame.f_back
    given = frame.f_locals
    lost = {name: given[name] for name in _LOST if given.get(name) is not None}
    if not lost.get("synced_gpus"):
        lost.pop("synced_gpus", None)
    return DroppedArguments(lost, given.get("kwargs") or {})
