"""The three stages of a step's work: copy to the device, compute, and copy back.

On a CUDA device each stage has a stream, and events order them. A step's inputs travel while the previous step runs,
and its tokens travel while the next step runs. On other devices, work has run when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_async_spec.streams import Arrival

Work = Callable[[], None]


class Streams(Protocol):
    """Where the stages of steps are launched. A slot is one of the sets of buffers that steps use in turn."""

    def copy_in(self, slot: int, copy: Work) -> None:
        """Launch the copy of a slot's inputs to the device, after all work on the slot's previous inputs."""
        ...

    def compute(self, slot: int, work: Work) -> None:
        """Launch work on a slot's inputs, after their copy and all earlier work launched here."""
        ...

    def copy_out(self, slot: int, copy: Work) -> Arrival:
        """Launch the copy of a slot's results to the host, after the work that computed them."""
        ...

    def drain(self) -> None:
        """Wait for all launched work."""
        ...


OpenStreams = Callable[[torch.device, int], Streams]
"""Takes a device and the number of slots; returns the streams."""


def open_streams(device: torch.device, slots: int) -> Streams:
    """CUDA streams for a CUDA device; for others, `HostStreams`, which run all work at once."""
    return CudaStreams(device, slots) if device.type == "cuda" else HostStreams()


class HostStreams:
    """The stages of a device without streams: each runs at once."""

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
    """The events of one slot."""

    copied_in: torch.cuda.Event
    computed: torch.cuda.Event
    copied_out: torch.cuda.Event


class CudaStreams:
    """Three CUDA streams, one for each stage, for as many buffer sets as steps use in turn."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self.stream = torch.cuda.Stream(device)
        """The stream that computes."""
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
            # Record after a failure too: work already launched may still read the inputs.
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
