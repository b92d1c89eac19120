"""What a wait for the device used to protect, and an event that is asked before it is waited for."""

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
    """Gives a host buffer that is written every step other memory each time, so that none is written in flight.

    Args:
        buffer: has a host tensor `cpu` and its NumPy view `np`, both of which are replaced at once.
        device: the device copied to.
        depth: as of `PinnedRing`.
    """

    def __init__(self, buffer: _Staged, device: torch.device, depth: int = 3) -> None:
        self._buffer = buffer
        self._ring = PinnedRing(tuple(buffer.cpu.shape), buffer.cpu.dtype, depth=depth, device=device)
        self._take()

    def turn(self) -> None:
        """To be called when the copy of this step has been launched: the next step writes elsewhere."""
        self._ring.fence()
        self._take()

    def _take(self) -> None:
        self._buffer.cpu = self._ring.next()
        self._buffer.np = self._buffer.cpu.numpy()


class PolledEvent:
    """An event that usually has happened when the host comes to wait for it, and is waited for only if it has not.

    Args:
        event: with `query`, `record` and `synchronize`.
        name: what the reports call a wait for it.
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
        """Return when the event has happened; a wait for it is counted."""
        counted_wait(self._event, self._name, 0)
