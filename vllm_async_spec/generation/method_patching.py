"""Replacing a method of one model for as long as anybody generates with it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.patching import Transaction

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a method of the model to the one that takes its place."""


@dataclass(slots=True)
class _Use:
    changes: Transaction
    hides_own: bool
    """Whether the model itself, not its class, had something by that name."""
    generations: int = 0


_uses: weakref.WeakKeyDictionary[Any, dict[str, _Use]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def replaced(model: Any, name: str, change: Change) -> Iterator[None]:
    """Have what `change` makes of `model.name` in its place.

    Threads may generate with one model at a time, if each brings a `change` that does the same.

    Args:
        model: a `GenerationMixin`.
        name: of a method.
        change: the first to come is asked; it wraps, because transformers looks at signatures.
    """
    with _lock:
        uses = _uses.setdefault(model, {})
        if name not in uses:
            use = _Use(Transaction(), hides_own=name in vars(model))
            use.changes.set(model, name, change(getattr(model, name)))
            uses[name] = use
        use = uses[name]
        use.generations += 1
    try:
        yield
    finally:
        with _lock:
            use.generations -= 1
            if not use.generations:
                use.changes.roll_back()
                del uses[name]


def has_own(model: Any, name: str) -> bool:
    """Whether the model itself, not its class, has something by that name that nobody `replaced` it with."""
    with _lock:
        use = _uses.get(model, {}).get(name)
        return name in vars(model) if use is None else use.hides_own
