"""The controls: the same requests while the engine loses count, which the comparison must notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM, RequestOutput

Corrupt = Callable[[int, "Tensor"], None]
"""Given the step and the valid tokens of each request in it, [batch] int32, changes the latter in place."""


def corrupted(
    run: Callable[[LLM], Sequence[RequestOutput]], make: Callable[[], Corrupt]
) -> Callable[[LLM], Sequence[RequestOutput]]:
    """`run`, with what the device believes to have been accepted changed in each step.

    Synchronous scheduling never looks at it, so there the outputs stay right.
    """

    def wrapped(llm: LLM) -> Sequence[RequestOutput]:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        original, steps, corrupt = runner._copy_valid_sampled_token_count, itertools.count(), make()

        def copy(next_token_ids: Tensor, counts: Tensor) -> None:
            counts = counts.clone()
            corrupt(next(steps), counts)
            original(next_token_ids, counts)

        assert llm.reset_prefix_cache()  # or what the cache holds would not be computed, and so not be wrong
        runner._copy_valid_sampled_token_count = copy
        try:
            return run(llm)
        finally:
            del runner._copy_valid_sampled_token_count
            assert llm.reset_prefix_cache()

    return wrapped


def one_too_many() -> Corrupt:
    def corrupt(step: int, counts: Tensor) -> None:
        if step == 5:
            counts[(counts < 4).nonzero()[0]] += 1

    return corrupt


def a_step_late() -> Corrupt:
    """Each step sees the counts of the step before it: the race that waiting for the device used to prevent."""
    seen: list[Tensor] = []

    def corrupt(step: int, counts: Tensor) -> None:
        seen.append(counts.clone())
        if step and seen[-2].shape == counts.shape:
            counts.copy_(seen[-2])

    return corrupt
