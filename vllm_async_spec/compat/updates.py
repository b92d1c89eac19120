"""Draft steps that go on with the metadata of the step before, updated: what vLLM's V2 runner does in one CUDA graph.

A builder that keeps a stale value there makes wrong drafts. These change no token, so no test of tokens shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_async_spec.compat.cases import UPDATED, Case

_ADVANCED = ("seq_lens", "slot_mapping")
"""Fields of the common metadata that vLLM writes in place between draft steps."""


def update_cases(builder: Any) -> tuple[Case, ...]:
    """The batches whose metadata the builder says that it can update; none if it does not say so."""
    return UPDATED if getattr(builder, "supports_draft_decode_metadata_update", False) is True else ()


def advance(metadata: Any, later: Any) -> None:
    """Write the device values of the draft step `later` into the common metadata of the step before, in place."""
    for name in _ADVANCED:
        getattr(metadata, name).copy_(getattr(later, name))


def relaunched(calls: Mapping[str, Any], built: int | None) -> Mapping[str, Any]:
    """Kernel calls in which those of an update are in the place of the build's, as if one build had made them.

    Args:
        calls: Arguments by number and name, such as `kernel 0 get_scheduler_metadata`, in their order.
        built: How many of them the build made; None without an update.
    """
    if built is None:
        return calls
    found = [(name.split(maxsplit=2)[2], arguments) for name, arguments in calls.items()]
    first, updates = found[:built], found[built:]
    replaced: set[int] = set()
    for name, arguments in updates:
        place = next((at for at, (each, _) in enumerate(first) if each == name and at not in replaced), len(first))
        first[place : place + 1] = [(name, arguments)]
        replaced.add(place)
    return {f"kernel {number} {name}": arguments for number, (name, arguments) in enumerate(first)}
