"""Host buffers that need no wait before the next write, and events that are queried before a wait."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt
import torch

from vllm_async_spec.host_copy import PinnedRing
from vllm_async_spec.streams import counted_wait


class _Staged(Protocol):
    cpu: torch.Tensor
    np: npt.NDArray[Any]


class RotatingBuffer:
    """Gives a host buffer other memory each step, so that the host never writes memory that a copy still reads.

    Args:
        buffer: has a host tensor `cpu` and its NumPy view `np`; the constructor and each `turn` replace both.
        device: the device copied to.
        depth: as in `PinnedRing`.
    """

    def __init__(self, buffer: _Staged, device: torch.device, depth: int = 3) -> None:
        self._buffer = buffer
        self._ring = PinnedRing(tuple(buffer.cpu.shape), buffer.cpu.dtype, depth=depth, device=device)
        self._take()

    def turn(self) -> None:
        """Switch to other memory for the next step; call this after launching the copy of this step."""
        self._ring.fence()
        self._take()

    def _take(self) -> None:
        self._buffer.cpu = self._ring.next()
        self._buffer.np = self._buffer.cpu.numpy()


class PolledEvent:
    """An event that has usually happened by the time the host needs it; the host waits only if it has not.

    Args:
        event: with `query`, `record` and `synchronize`.
        name: name of the wait in the reports.
    """

    def __init__(self, event: Any, name: str) -> None:
        self._event = event
        self._name = name

    def record(self, *args: Any) -> None:
        """Record the event."""
        self._event.record(*args)

    def query(self) -> bool:
        """Whether the event has happened."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Return when the event has happened; counts the wait, if any."""
        counted_wait(self._event, self._name, 0)
