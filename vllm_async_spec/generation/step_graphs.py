"""One CUDA graph of a decode step for each slot, captured once, from one memory pool."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_async_spec.generation.slots import Slots
from vllm_async_spec.streams import captured

_WAITS = "called a synchronizing CUDA operation"


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
        _refuse_host_reads(lambda: step(0), rewind)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._replays: list[Callable[[], torch.Tensor | None]] = []
        for slot in range(len(slots.streams)):
            rewind()
            # Capture both on one stream, for replay on any: a pool never gives one stream's freed memory to another.
            how = {"stream": slots.streams[0], "capture_error_mode": "thread_local"}
            self._replays.append(captured(functools.partial(step, slot), self.pool, **how))

    def replay(self, slot: int) -> torch.Tensor | None:
        """Launch the step of `slot` on the current stream; return its kept tensor, valid once the step has run."""
        return self._replays[slot]()


def _refuse_host_reads(step: Callable[[], object], rewind: Callable[[], None]) -> None:
    """Run the step once more, and raise `RuntimeError` if it waits for the device.

    Found during a capture, the wait would leave the allocator and the random generator in capture state.
    """
    mode = torch.cuda.get_sync_debug_mode()
    rewind()
    with _waits_refused():
        # The mode is process-wide: "error" would also make other threads' reads fail.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _waits_refused() -> Iterator[None]:
    """Turn PyTorch's warning of a device wait into an error in this thread, and drop it in others.

    Raises:
        RuntimeError: the block waits for the device.
    """
    here = threading.get_ident()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WAITS)
        show = warnings.showwarning

        def refuse(message: Warning | str, *where: Any, **more: Any) -> None:
            if _WAITS not in str(message):
                show(message, *where, **more)
            elif threading.get_ident() == here:
                raise RuntimeError(str(message))

        warnings.showwarning = refuse
        yield
