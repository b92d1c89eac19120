"""How the host learns that every row has stopped: flags travel beside the steps, and a tracker reads them late."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_async_spec.host_copy import PinnedRing
from vllm_async_spec.streams import counted_wait


class SentFlags(Protocol):
    """Flags that were sent to the host."""

    def arrived(self) -> bool:
        """Whether they are there. Never waits."""
        ...

    def wait(self) -> list[bool]:
        """The flags, after waiting for them if they are not there yet."""
        ...


class FlagChannel(Protocol):
    """Where stop flags are computed and how they reach the host."""

    def beside(self) -> AbstractContextManager[None]:
        """Run the block's device work beside the current stream, after all that was launched there so far."""
        ...

    def join(self) -> None:
        """Make the current stream, not the host, wait for what was launched `beside` it."""
        ...

    def send(self, flags: torch.Tensor) -> SentFlags:
        """Start copying `flags`, bool (width,), to the host, behind what was launched on the current stream.

        That is the side stream inside `beside`, and outside of it the one that generates.
        """
        ...


OpenChannel = Callable[[torch.device, int, int], FlagChannel | None]
"""From device, width and how many copies are in flight at most to a channel; None where none is needed."""


def open_channel(device: torch.device, width: int, in_flight: int) -> FlagChannel | None:
    """The channel of a CUDA device; None for any other, whose flags are read where they are."""
    return CudaFlagChannel(device, width, in_flight) if device.type == "cuda" else None


class CudaFlagChannel:
    """A stream of its own, and pinned buffers in turn.

    Args:
        device: a CUDA device.
        width: flags in one copy.
        in_flight: copies that are under way at once at most.
    """

    def __init__(self, device: torch.device, width: int, in_flight: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # One more than may be in flight: whoever sends has read the oldest before its buffer comes round again.
        self._ring = PinnedRing((width,), torch.bool, depth=in_flight + 1, device=device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See `FlagChannel`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """See `FlagChannel`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def send(self, flags: torch.Tensor) -> SentFlags:
        """See `FlagChannel`."""
        buffer = self._ring.next()
        buffer.copy_(flags, non_blocking=True)
        event = self._ring.fence()
        assert event is not None
        return _CudaSentFlags(buffer, event)


@dataclass(slots=True)
class _CudaSentFlags:
    buffer: torch.Tensor
    event: torch.cuda.Event

    def arrived(self) -> bool:
        arrived: bool = self.event.query()
        return arrived

    def wait(self) -> list[bool]:
        counted_wait(self.event, "stop flags", self.buffer.nbytes)
        flags: list[bool] = self.buffer.tolist()
        return flags


@dataclass(slots=True)
class _Sent:
    arrival: SentFlags
    first_length: int
    """Length of the sequences at the step of the first flag; each further flag is one step later."""
    inputs: list[Any]
    """What the side stream reads: it must not be freed, and its memory reused, before it has been read."""


class FinishTracker:
    """Sends one flag a step, `width` of them at once, and knows the first step whose flag was set, once it has arrived.

    A finish is known at most `width * (in_flight + 1) - 1` steps late: nobody is further ahead than that.

    Args:
        channel: how flags travel.
        device: where they are computed.
        width: steps whose flags travel together, at least 1.
        in_flight: copies under way at most, at least 1; one more is waited for.
    """

    def __init__(self, channel: FlagChannel, device: torch.device, *, width: int, in_flight: int) -> None:
        self._channel = channel
        self._in_flight = in_flight
        self._flags = torch.zeros(width, dtype=torch.bool, device=device)
        self._places = self._flags.unbind()
        self._width = width
        self._inputs: list[Any] = []
        self._sent: deque[_Sent] = deque()
        self._last_length = 0
        self.finished_at: int | None = None
        """Length of the sequences when the last row stopped, as far as the host knows."""

    def record(self, finished: torch.Tensor, length: int, *inputs: Any) -> bool:
        """Note the flag of one step, on the current stream.

        Args:
            finished: bool (batch,), rows that have stopped at this step or before.
            length: of the sequences at this step.
            inputs: the tensors that `finished` was computed from, where that is beside the stream that frees them.

        Returns:
            Whether flags were sent: only then can there be something new to `poll`.
        """
        self._last_length = length
        if self._width == finished.numel() == 1:
            self._inputs.append((finished, *inputs))
            self._send(finished)  # one row of one step: there is nothing to put together
            return True
        torch.all(finished, dim=0, out=self._places[len(self._inputs)])
        self._inputs.append((finished, *inputs))
        full = len(self._inputs) == self._width
        if full:
            self._send(self._flags)
        return full

    def poll(self) -> None:
        """Look at what has arrived, without waiting for the rest."""
        while self.finished_at is None and self._sent and self._sent[0].arrival.arrived():
            self._read()

    def drain(self) -> None:
        """Wait for everything that was recorded, until a set flag is found."""
        if self.finished_at is None and self._inputs:
            with self._channel.beside():
                self._send(self._flags)
        while self.finished_at is None and self._sent:
            self._read()

    def _send(self, flags: torch.Tensor) -> None:
        if len(self._sent) == self._in_flight:
            self._read()
        first = self._last_length - len(self._inputs) + 1
        self._sent.append(_Sent(self._channel.send(flags), first, self._inputs))
        self._inputs = []

    def _read(self) -> None:
        sent = self._sent.popleft()
        # Behind the flags of fewer steps are some that were sent before; a set one would have been found there.
        flags = sent.arrival.wait()
        if self.finished_at is None and any(flags):
            self.finished_at = sent.first_length + flags.index(True)
