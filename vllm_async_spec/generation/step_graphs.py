"""One CUDA graph of a decode step for each slot, captured once, from one memory pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_async_spec.generation.slots import Slots
from vllm_async_spec.streams import captured_beside_others, refuse_waits


class StepGraphs:
    """The captured step of each slot.

    The graphs share one memory pool, so two slots take no more memory than one. The second graph reuses the first
    one's memory, which is safe because the graphs never run at once.

    Args:
        slots: where the steps run.
        step: runs the step of a slot, and returns a tensor to keep, or None. It has run in each slot before.
        rewind: called before each run; makes room for one more step.

    Raises:
        RuntimeError: the step reads the device from the host, or does something else that can't be captured.
    """

    def __init__(
        self,
        slots: Slots,
        step: Callable[[int], torch.Tensor | None],
        rewind: Callable[[], None],
    ) -> None:
        # Run this off the slots' streams, so that cuBLAS allocates its workspace in the capture, from the pool.
        rewind()
        refuse_waits(lambda: step(0))
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._replays: list[Callable[[], torch.Tensor | None]] = []
        for slot in range(len(slots.streams)):
            # Capture both on one stream, for replay on any: a pool never gives one stream's freed memory to another.
            how = {"stream": slots.streams[0], "capture_error_mode": "thread_local"}
            self._replays.append(captured_beside_others(rewind, functools.partial(step, slot), self.pool, **how))

    def replay(self, slot: int) -> torch.Tensor | None:
        """Launch the step of `slot` on the current stream; return its kept tensor, valid once the step has run."""
        return self._replays[slot]()
