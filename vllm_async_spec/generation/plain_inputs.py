"""Plain tensors for a compiled forward: a tensor of a class of ours would have it compiled anew, at each value."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_NAME = "prepare_inputs_for_generation"


@dataclass(slots=True)
class _Use:
    before: Any
    """What the model itself, not its class, had by that name; None if nothing."""
    generations: int = 0


_uses: weakref.WeakKeyDictionary[Any, _Use] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def inputs_after(model: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Have `model.prepare_inputs_for_generation` return what `change` makes of its inputs.

    It is the last of transformers' own code that sees them before the forward, and the only seam there: what it was
    given it may have read. Threads may generate with one model at a time, if each brings the same `change`.

    Args:
        model: a `GenerationMixin`.
        change: from one input to the one that the forward is given.
    """
    with _lock:
        use = _uses.setdefault(model, _Use(vars(model).get(_NAME)))
        use.generations += 1
        if use.generations == 1:
            setattr(model, _NAME, _changed(getattr(model, _NAME), change))
    try:
        yield
    finally:
        with _lock:
            use.generations -= 1
            if not use.generations:
                delattr(model, _NAME)
                if use.before is not None:
                    setattr(model, _NAME, use.before)
                del _uses[model]


def _changed(prepare: Callable[..., dict[str, Any]], change: Callable[[Any], Any]) -> Callable[..., dict[str, Any]]:
    # Wrapped, because transformers looks at its signature.
    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: change(each) for name, each in prepare(*args, **kwargs).items()}

    return prepared
