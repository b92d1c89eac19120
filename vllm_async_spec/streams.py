"""Stream helpers shared by plugin, generation and batching: counted waits for events, and CUDA graph capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from vllm_async_spec.sync_policy import ReadKind, host_read

Kept = TypeVar("Kept")


class Arrival(Protocol):
    """Data on its way to the host, such as a CUDA event after a copy."""

    def query(self) -> bool:
        """Whether the data has arrived. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the data has arrived."""
        ...


def counted_wait(arrival: Arrival, what: str, nbytes: int) -> None:
    """Wait for an arrival. If the data has not arrived yet, count the wait, under every sync policy.

    Args:
        arrival: the data to wait for.
        what: its name in the sync report.
        nbytes: bytes copied to the host.
    """
    if not arrival.query():
        with host_read(what, nbytes, ReadKind.EVENT):
            arrival.synchronize()


def captured(run: Callable[[], Kept], pool: Any, **capture: Any) -> Callable[[], Kept]:
    """Capture the kernels that `run` launches as a CUDA graph.

    Args:
        run: must have run before, so that the capture compiles nothing.
        pool: the graph's memory pool, a `torch.cuda.graph_pool_handle()`.
        capture: arguments of `torch.cuda.graph`, such as `stream`.

    Returns:
        A function that replays the graph on the current stream. Returns what `run` returned, valid after the replay.

    Raises:
        RuntimeError: `run` waits for the device, or does something else that can't be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, **capture):
        kept = run()

    def replay() -> Kept:
        graph.replay()
        return kept

    return replay
