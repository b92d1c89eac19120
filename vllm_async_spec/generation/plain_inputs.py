"""Plain tensors for a compiled forward: a tensor of a class of ours would have it compiled anew, at each value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_async_spec.generation.method_patching import replaced


def inputs_after(model: Any, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Have `model.prepare_inputs_for_generation` return what `change` makes of its inputs.

    It is the last of transformers' own code that sees them before the forward, and the only seam there: what it was
    given it may have read. Threads may generate with one model at a time, if each brings the same `change`.

    Args:
        model: a `GenerationMixin`.
        change: from one input to the one that the forward is given.
    """
    return replaced(model, "prepare_inputs_for_generation", functools.partial(_changed, change))


def _changed(change: Callable[[Any], Any], prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: change(each) for name, each in prepare(*args, **kwargs).items()}

    return prepared
