"""Two slots in which steps take turns, each with a stream of its own, and the events that keep them in order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Slots(Protocol):
    """Where the steps of a generation run.

    The device work of a step may read what the step before has written, and may overwrite what the step before that
    wrote: flags, which are read beside. Each method here is one order that these two things need.
    """

    @property
    def streams(self) -> tuple[Any, ...]:
        """A CUDA stream of each slot; none where there are no streams."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Keep the generations of other threads off the slots in the block, and put it behind those before."""
        ...

    def begin(self) -> None:
        """Put both slots behind what the caller has launched so far."""
        ...

    def step(self, slot: int) -> AbstractContextManager[None]:
        """Run the block's device work in `slot`: behind the last step of the other, and the reading of its flags."""
        ...

    def flags_read(self, slot: int) -> None:
        """Note that the flags of the last step of `slot` have been read and judged; called beside, where they are."""
        ...

    def await_judgement(self, slot: int) -> None:
        """Put what follows, in the block of the other slot's step, behind `flags_read` of `slot`."""
        ...

    def end(self) -> None:
        """Put what the caller launches from here on behind both slots."""
        ...


class HostSlots:
    """The slots of a device that does one thing after the other: everything is in order."""

    streams: tuple[Any, ...] = ()

    def turn(self) -> AbstractContextManager[None]:
        """See `Slots`; there is nothing that two generations share."""
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
    """Two CUDA streams: the same for all generations on a device, because libraries keep memory for each stream.

    So generations on a device take turns. Events order the steps of one generation. Two at once would share, unordered:

    - memory: what one frees on a stream, while its step on the other stream still reads it, the other may take;
    - the workspace of cuBLAS: graphs captured on one stream by one thread use the same, whichever model they are of;
    - a capture, which takes in all that any thread launches on its stream;
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
        """See `Slots`. A generation inside another one, in a stopping criterion say, is part of its turn."""
        with self._turn:
            # The last steps of the generation before may still run, and this caller's stream is perhaps another.
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
