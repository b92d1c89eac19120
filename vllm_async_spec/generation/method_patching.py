"""Replaces a method of one model while generations use it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.patching import Transaction

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a method of the model; returns its replacement."""


@dataclass(slots=True)
class _Use:
    changes: Transaction
    hides_own: bool
    """Whether the model itself, not its class, had an attribute of that name."""
    generations: int = 0


_uses: weakref.WeakKeyDictionary[Any, dict[str, _Use]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def replaced(model: Any, name: str, change: Change) -> Iterator[None]:
    """Replace the model's method `name` by what `change` makes of it, in the block.

    `change` must wrap the method, because transformers inspects signatures. Several threads may generate with one model
    at a time, if each passes a `change` that does the same; only the first thread's is called.
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
    """Whether the model itself, not its class, has an attribute of this name; `replaced` does not count."""
    with _lock:
        use = _uses.get(model, {}).get(name)
        return name in vars(model) if use is None else use.hides_own
