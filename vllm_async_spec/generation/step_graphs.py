"""One CUDA graph a slot of a decode step, captured once, from one memory pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_async_spec.generation.slots import Slots

_WARM_UPS = 2
"""Runs of a step on a stream before it is captured: libraries make their workspaces in the first."""


class StepGraphs:
    """The captured step of each slot.

    The two graphs share one pool: the second uses the memory of the first again, which is right because they never run
    at once. So two slots take no more than one.

    Args:
        slots: where the steps run.
        step: runs the step of a slot, and returns tensors that are to be kept, or None.
        rewind: called before each run: makes room for one more step.
        device: a CUDA device.

    Raises:
        RuntimeError: the step reads the device from the host, or does something else that can't be captured.
    """

    def __init__(
        self,
        slots: Slots,
        step: Callable[[int], torch.Tensor | None],
        rewind: Callable[[], None],
        device: torch.device,
    ) -> None:
        current = torch.cuda.current_stream(device)
        for slot, stream in enumerate(slots.streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    rewind()
                    step(slot)
            current.wait_stream(stream)
        _refuse_host_reads(lambda: step(0), rewind)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._kept: list[torch.Tensor | None] = []
        for slot, stream in enumerate(slots.streams):
            rewind()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                self._kept.append(step(slot))
            self._graphs.append(graph)
        # The warm-up's memory, which nothing uses again.
        torch.cuda.empty_cache()

    def replay(self, slot: int) -> torch.Tensor | None:
        """Launch the step of `slot` on the current stream; returns what it kept, written when the step has run."""
        self._graphs[slot].replay()
        return self._kept[slot]


def _refuse_host_reads(step: Callable[[], object], rewind: Callable[[], None]) -> None:
    """Run the step once more, and let PyTorch refuse what waits for the device.

    Found out in a capture, the same would leave the allocator and the random generator in it.
    """
    mode = torch.cuda.get_sync_debug_mode()
    rewind()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
