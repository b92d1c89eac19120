"""One CUDA graph a slot of a decode step, captured once, from one memory pool."""

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

    The two graphs share one pool: the second uses the memory of the first again, which is right because they never run
    at once. So two slots take no more than one.

    Args:
        slots: where the steps run.
        step: runs the step of a slot, and returns a tensor that is to be kept, or None. Each has run before.
        rewind: called before each run: makes room for one more step.

    Raises:
        RuntimeError: the step reads the device from the host, or does something else that can't be captured.
    """

    def __init__(
        self,
        slots: Slots,
        step: Callable[[int], torch.Tensor | None],
        rewind: Callable[[], None],
    ) -> None:
        # Not on the slots' streams: what cuBLAS keeps for a stream is then made in the capture, and is of the pool.
        _refuse_host_reads(lambda: step(0), rewind)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._replays: list[Callable[[], torch.Tensor | None]] = []
        for slot in range(len(slots.streams)):
            rewind()
            # One stream for both, whichever they are replayed on: what one stream frees, a pool gives to no other.
            how = {"stream": slots.streams[0], "capture_error_mode": "thread_local"}
            self._replays.append(captured(functools.partial(step, slot), self.pool, **how))

    def replay(self, slot: int) -> torch.Tensor | None:
        """Launch the step of `slot` on the current stream; returns what it kept, written when the step has run."""
        return self._replays[slot]()


def _refuse_host_reads(step: Callable[[], object], rewind: Callable[[], None]) -> None:
    """Run the step once more, and let PyTorch refuse what waits for the device.

    Found out in a capture, the same would leave the allocator and the random generator in it.
    """
    mode = torch.cuda.get_sync_debug_mode()
    rewind()
    with _waits_refused():
        # The mode is the process's: as an error it would also end what other threads read.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _waits_refused() -> Iterator[None]:
    """Make PyTorch's warning of a wait for the device an error in this thread, and nothing in others.

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
