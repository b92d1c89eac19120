"""The three streams that the work of a step goes through: to the device, on the device, and back.

On a CUDA device each is a stream, and events join them, so that the inputs of a step travel while the one before runs,
and its tokens while the next one does. Elsewhere what is launched has run when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_async_spec.streams import Arrival

Work = Callable[[], None]


class Streams(Protocol):
    """Where the parts of steps are launched. A slot is one of the sets of inputs that steps use in turn."""

    def copy_in(self, slot: int, copy: Work) -> None:
        """Launch the copy of a slot's inputs to the device, after all that computed with those before."""
        ...

    def compute(self, slot: int, work: Work) -> None:
        """Launch what computes with a slot's inputs, after their copy and all that was launched here before."""
        ...

    def copy_out(self, slot: int, copy: Work) -> Arrival:
        """Launch the copy of a slot's results to the host, after what computed them."""
        ...

    def drain(self) -> None:
        """Wait for everything that was launched."""
        ...


OpenStreams = Callable[[torch.device, int], Streams]
"""From a device and how many slots there are to the streams."""


def open_streams(device: torch.device, slots: int) -> Streams:
    """Streams on a CUDA device; else none, and all is done at once."""
    return CudaStreams(device, slots) if device.type == "cuda" else HostStreams()


class HostStreams:
    """Of a device that nothing is late on."""

    def copy_in(self, slot: int, copy: Work) -> None:
        """See `Streams`."""
        copy()

    def compute(self, slot: int, work: Work) -> None:
        """See `Streams`."""
        work()

    def copy_out(self, slot: int, copy: Work) -> Arrival:
        """See `Streams`."""
        copy()
        return _Arrived()

    def drain(self) -> None:
        """See `Streams`."""


class _Arrived:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Events:
    """Of one slot."""

    copied_in: torch.cuda.Event
    computed: torch.cuda.Event
    copied_out: torch.cuda.Event


class CudaStreams:
    """Three streams of a device.

    Args:
        device: a CUDA device.
        slots: how many sets of inputs steps use in turn.
    """

    def __init__(self, device: torch.device, slots: int) -> None:
        self.stream = torch.cuda.Stream(device)
        """The one that computes."""
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._events = [_Events(torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()) for _ in range(slots)]

    def copy_in(self, slot: int, copy: Work) -> None:
        """See `Streams`."""
        events = self._events[slot]
        self._in.wait_event(events.computed)
        with torch.cuda.stream(self._in):
            copy()
        events.copied_in.record(self._in)

    def compute(self, slot: int, work: Work) -> None:
        """See `Streams`."""
        events = self._events[slot]
        self.stream.wait_event(events.copied_in)
        try:
            with torch.cuda.stream(self.stream):
                work()
        finally:
            # Also of work that failed half-way: it may read the inputs still.
            events.computed.record(self.stream)

    def copy_out(self, slot: int, copy: Work) -> Arrival:
        """See `Streams`."""
        events = self._events[slot]
        self._out.wait_event(events.computed)
        with torch.cuda.stream(self._out):
            copy()
        events.copied_out.record(self._out)
        arrival: Arrival = events.copied_out
        return arrival

    def drain(self) -> None:
        """See `Streams`."""
        for stream in (self._in, self.stream, self._out):
            stream.synchronize()
