"""Saying once that nothing is asynchronous, and why."""

from __future__ import annotations

import warnings

_said: set[str] = set()


class SynchronousGenerationWarning(UserWarning):
    """Asynchronous stopping was asked for, and generation is synchronous: the same tokens, nothing won."""


def warn_once(reason: str) -> None:
    """Warn that generation is synchronous because of `reason`; each reason is told once a process."""
    if reason not in _said:
        _said.add(reason)
        message = f"stopping criteria are evaluated synchronously: {reason}"
        warnings.warn(message, SynchronousGenerationWarning, stacklevel=2)
