"""CUDA streams without CUDA: each does its work when it likes, in any order that the events between them allow.

What `CudaSlots` and `CudaFlagChannel` launch is put off, and done at random by a seed. So an order that nothing
enforces comes out wrong sooner or later.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_steps import RecordedSteps
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vllm_async_spec.generation import decode, flag_channel, interleaved, slots, workspace
from vllm_async_spec.host_copy import PinnedRing


class Device:
    """What is launched and not done yet, stream by stream. The caller's stream does everything at once."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.caller = Stream(self, at_once=True)
        self.current = self.caller
        self._slowest = self.caller

    def run_some(self) -> None:
        for _ in range(self.chance.choice((0, 0, 0, 1, 5))):
            if not self.run_one():
                return

    def run_one(self) -> bool:
        ready = [stream for stream in self.streams if stream.is_ready()]
        if not ready:
            return False
        if self.chance.random() < 0.1:
            self._slowest = self.chance.choice(self.streams)
        # One that is slow for a while does nothing as long as another can.
        self.chance.choice([stream for stream in ready if stream is not self._slowest] or ready).run_one()
        return True

    def run_until(self, event: Event) -> None:
        while not event.happened:
            assert self.run_one(), "streams wait for each other in a circle"


class Stream:
    def __init__(self, device: Device, *, at_once: bool = False):
        self.device = device
        self.at_once = at_once
        self.cuda_stream = id(self)
        self._work: deque[tuple[Event | None, Callable[[], None]]] = deque()
        device.streams.append(self)

    def launch(self, work: Callable[[], None], *, behind: Event | None = None) -> None:
        if self.at_once:
            if behind is not None:
                self.device.run_until(behind)
            work()
            return
        self._work.append((behind, work))

    def is_ready(self) -> bool:
        return bool(self._work) and (self._work[0][0] is None or self._work[0][0].happened)

    def run_one(self) -> None:
        _, work = self._work.popleft()
        with _disable_current_modes():
            work()

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.last is not None:
            self.launch(lambda: None, behind=event.last)

    def wait_stream(self, other: Stream) -> None:
        event = SimulatedEvent()
        event.record(other)
        self.wait_event(event)


class Event:
    happened = False

    def happen(self) -> None:
        self.happened = True


class SimulatedEvent:
    def __init__(self) -> None:
        self.last: Event | None = None
        self._device: Device | None = None

    def record(self, stream: Stream) -> None:
        self._device = stream.device
        self.last = Event()
        stream.launch(self.last.happen)

    def query(self) -> bool:
        assert self._device is not None
        self._device.run_some()
        return self.last is None or self.last.happened

    def synchronize(self) -> None:
        assert self._device is not None
        if self.last is not None:
            self._device.run_until(self.last)


class PutOff(TorchDispatchMode):
    """What is written in place, inside, is launched on a stream and not done at once; what it is written from, too."""

    def __init__(self, stream: Stream):
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
        ]
        if not written:
            # Views are only another way to look at the same memory.
            assert func.is_view, f"{func} makes a tensor whose values would be known at once"
            return func(*args, **kwargs)
        self._stream.launch(lambda: func(*args, **kwargs))
        return kwargs["out"] if "out" in kwargs else args[0]


class PutOffSteps(RecordedSteps):
    """Recorded steps that are launched on the current stream."""

    def replay(self, slot: int) -> None:
        device_of(self).current.launch(lambda: RecordedSteps.replay(self, slot) and None)


class Ring(PinnedRing):
    def fence(self) -> Any:
        event = SimulatedEvent()
        event.record(_device[0].current)
        self._fences[self._turn] = event  # type: ignore[assignment]
        return event


_device: list[Device] = []


def device_of(_: Any) -> Device:
    return _device[0]


@contextlib.contextmanager
def simulated(seed: int) -> Iterator[pytest.MonkeyPatch]:
    """Interleaved generation on the CPU runs on simulated streams inside; the patch is for taking more away."""
    device = Device(seed)
    _device[:] = [device]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            with PutOff(stream):
                yield
        finally:
            device.current = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda _: Stream(device))
        patch.setattr(torch.cuda, "Event", SimulatedEvent)
        patch.setattr(torch.cuda, "current_stream", lambda _: device.current)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "memory_snapshot", list)
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        patch.setattr(flag_channel, "PinnedRing", Ring)
        patch.setattr(slots, "_streams", {})
        patch.setattr(decode, "StepGraphs", PutOffSteps)
        patch.setattr(interleaved, "slots_of", slots.CudaSlots)
        patch.setattr(interleaved, "_captures", lambda switches, device: switches.cuda_graphs)
        patch.setattr(workspace, "_kept", type(workspace._kept)())
        yield patch
