"""What plugin, generation and batching share of streams: waiting for an event, counted, and capturing a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from vllm_async_spec.sync_policy import ReadKind, host_read

Kept = TypeVar("Kept")


class Arrival(Protocol):
    """Something on its way to the host; a CUDA event is one."""

    def query(self) -> bool:
        """Whether it is there. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until it is."""
        ...


def counted_wait(arrival: Arrival, what: str, nbytes: int) -> None:
    """Wait for an arrival. If it is not there yet, the wait is counted, in every sync policy.

    Args:
        arrival: what is waited for.
        what: its name in the sync report.
        nbytes: how much was copied to the host.
    """
    if not arrival.query():
        with host_read(what, nbytes, ReadKind.EVENT):
            arrival.synchronize()


def captured(run: Callable[[], Kept], pool: Any, **capture: Any) -> Callable[[], Kept]:
    """Capture what `run` launches as a CUDA graph.

    Args:
        run: has run before, so that nothing is compiled in the capture.
        pool: where the graph has its memory, a `torch.cuda.graph_pool_handle()`.
        capture: arguments of `torch.cuda.graph`, such as `stream`.

    Returns:
        Replays the graph on the current stream, and returns what `run` returned, written when the graph has run.

    Raises:
        RuntimeError: `run` waits for the device, or does something else that no graph can hold.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, **capture):
        kept = run()

    def replay() -> Kept:
        graph.replay()
        return kept

    return replay
