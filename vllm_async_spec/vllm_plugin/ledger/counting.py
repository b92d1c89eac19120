"""Counts the patches in each state: the same way for the log, `/metrics`, the audit and `status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from vllm_async_spec.vllm_plugin.ledger.applying import State

_COUNTED = (State.APPLIED, State.NOT_NEEDED, State.REFUSED, State.WAITING)


def count_states(states: Mapping[str, State]) -> dict[str, int]:
    """The number of patches in each state but `off`, without the patches that only serve the audit."""
    counts = Counter(state for name, state in states.items() if not name.startswith("audit-"))
    return {state.value: counts[state] for state in _COUNTED}


def summary(counts: Mapping[str, int]) -> str:
    """The counts in words, without states that no patch is in."""
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
