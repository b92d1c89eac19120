"""Two slots between which steps alternate, each with its own stream, and the events that order the steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Slots(Protocol):
    """Where the steps of a generation run.

    A step may read what the previous step wrote. It may overwrite the flags of the step before that, which a side
    stream reads. Each method here enforces one order that these accesses need.
    """

    @property
    def streams(self) -> tuple[Any, ...]:
        """The CUDA stream of each slot; empty if there are no streams."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Keep other threads' generations off the slots in the block, and run it after earlier generations."""
        ...

    def begin(self) -> None:
        """Make both slots wait for the caller's device work so far."""
        ...

    def step(self, slot: int) -> AbstractContextManager[None]:
        """Run the block's device work in `slot`, after the other slot's last step and the reading of its own flags."""
        ...

    def flags_read(self, slot: int) -> None:
        """Record, on the side stream, that the flags of the last step of `slot` have been evaluated and read."""
        ...

    def await_judgement(self, slot: int) -> None:
        """Inside the other slot's step: make its further work wait for `flags_read` of `slot`."""
        ...

    def end(self) -> None:
        """Make the caller's further device work wait for both slots."""
        ...


class HostSlots:
    """The slots of a device that runs everything in order, such as a CPU."""

    streams: tuple[Any, ...] = ()

    def turn(self) -> AbstractContextManager[None]:
        """See `Slots`; generations share nothing here."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """See `Slots`."""

    def step(self, slot: int) -> AbstractContextManager[None]:
        """See `Slots`."""
        return contextlib.nullcontext()

    def flags_read(self, slot: int) -> None:
        """See `Slots`."""

    def await_judgement(self, slot: int) -> None:
        """See `Slots`."""

    def end(self) -> None:
        """See `Slots`."""


_streams: dict[torch.device, tuple[Any, Any]] = {}
_turns: dict[torch.device, threading.RLock] = {}


class CudaSlots:
    """Two CUDA streams, the same for all generations on a device, because libraries keep memory for each stream.

    Generations on a device take turns; events order the steps of one generation. Two at once would share, unordered:

    - memory: one generation frees it while its other stream still reads it, and the other generation reuses it;
    - the workspace of cuBLAS: graphs captured on one stream by one thread share it, even graphs of different models;
    - a capture, which includes everything that any thread launches on its stream;
    - the state of the default random generator, which a launch writes to the device and a graph reads there.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = _turns.setdefault(device, threading.RLock())
        with self._turn:
            if device not in _streams:
                _streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        self.streams: tuple[Any, ...] = _streams[device]
        self._stepped = (torch.cuda.Event(), torch.cuda.Event())
        self._read = (torch.cuda.Event(), torch.cuda.Event())

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """See `Slots`. A nested generation, for example in a stopping criterion, is part of the outer turn."""
        with self._turn:
            # The previous generation's last steps may still run, and this caller's stream may be another.
            self.end()
            yield

    def begin(self) -> None:
        """See `Slots`."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextlib.contextmanager
    def step(self, slot: int) -> Iterator[None]:
        """See `Slots`."""
        stream = self.streams[slot]
        self._await_step(stream, 1 - slot)
        self._await_reading(stream, slot)
        with torch.cuda.stream(stream):
            yield
        self._stepped[slot].record(stream)

    def flags_read(self, slot: int) -> None:
        """See `Slots`."""
        self._read[slot].record(torch.cuda.current_stream(self._device))

    def await_judgement(self, slot: int) -> None:
        """See `Slots`."""
        torch.cuda.current_stream(self._device).wait_event(self._read[slot])

    def end(self) -> None:
        """See `Slots`."""
        for stream in self.streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _await_step(self, stream: torch.cuda.Stream, other: int) -> None:
        stream.wait_event(self._stepped[other])

    def _await_reading(self, stream: torch.cuda.Stream, slot: int) -> None:
        stream.wait_event(self._read[slot])
