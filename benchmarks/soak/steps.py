"""Steps that patches of the V1 runner of 0.19 to 0.29 prepared, each instead of vLLM's code, in this process.

And plans of FlashInfer's wrappers that keep keys whole: each serves the steps that its requests fit in.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.runner_on_cpu import OTHER_ROWS
from benchmarks.soak.soaks import WHOLE_KEYS
from vllm_async_spec.attention.flashinfer import PaddedPlans
from vllm_async_spec.vllm_plugin.patches.carried_inputs import Carried
from vllm_async_spec.vllm_plugin.patches.steady_inputs import SteadyBatch
from vllm_async_spec.vllm_plugin.patches.steady_states import SteadyStates

_METHODS: dict[str, tuple[type, str]] = {
    "carried-inputs": (Carried, "tokens_of"),
    "steady-inputs": (SteadyBatch, "prepare"),
    OTHER_ROWS: (SteadyBatch, "gathered"),
    "steady-states": (SteadyStates, "advance"),
    WHOLE_KEYS: (PaddedPlans, "_even_starts"),
}
"""Of each patch, or of some of its steps, what prepares a step; it returns None for a step that it leaves to vLLM."""
_counts: Counter[str] = Counter()
_counting: list[str] = []


def count() -> None:
    """Count from now on, if nothing does yet."""
    for name in _METHODS.keys() - _counting:
        owner, method = _METHODS[name]
        setattr(owner, method, _counted(name, getattr(owner, method)))
        _counting.append(name)


def counts() -> dict[str, int]:
    """Steps since the first `count`, by patch; without patches that prepared none."""
    return dict(sorted(_counts.items()))


def _counted(name: str, prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def counting(*arguments: Any) -> Any:
        made = prepare(*arguments)
        if made is not None:
            _counts[name] += 1
        return made

    return counting
