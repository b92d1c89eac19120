"""Streams and events of the device that runs late: queues of its work, and moments in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from simulation.device import Gpu


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue: deque[Callable[[], Any] | Event] = deque()
        self.launched = self.done = 0
        if hasattr(gpu, "streams"):
            gpu.streams.append(self)

    def run_one(self) -> bool:
        if not self.queue:
            return False
        work = self.queue[0]
        if isinstance(work, Event):
            if not work.has_happened():
                return False
        else:
            with torch.inference_mode(), torch._C.DisableTorchFunction():
                work()
        self.queue.popleft()
        self.done += 1
        return True

    def run_until(self, count: int) -> None:
        while self.done < count:
            work = self.queue[0]
            if isinstance(work, Event):
                work.happen()
            self.run_one()

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.mark())
        self.launched += 1

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.waits.append("stream")
        self.run_until(self.launched)

    def query(self) -> bool:
        return self.done == self.launched


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.stream: Stream | None = None
        self.count = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.current
        self.count = self.stream.launched

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).wait_event(self)

    def mark(self) -> Event:
        """The moment that it is now; recording again does not move it."""
        mark = Event(self.gpu)
        mark.stream, mark.count = self.stream, self.count
        return mark

    def has_happened(self) -> bool:
        """Whether the stream is past it. One that was never recorded is nothing to wait for, as in CUDA."""
        return self.stream is None or self.stream.done >= self.count

    def happen(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.count)

    def query(self) -> bool:
        if self.gpu.late is not None and self.gpu.chance_to_run:
            self.gpu.run_some(self.gpu.late)
        return self.has_happened()

    def synchronize(self) -> None:
        if not self.has_happened():
            self.gpu.waits.append("event")
        self.happen()
