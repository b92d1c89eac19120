"""How the host learns that every row has stopped: flags are copied asynchronously, and a tracker reads them late."""

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
    """Flags on their way to the host."""

    def arrived(self) -> bool:
        """Whether the flags have arrived. Never waits."""
        ...

    def wait(self) -> list[bool]:
        """The flags; waits for them if they have not arrived yet."""
        ...


class FlagChannel(Protocol):
    """Computes stop flags on a side stream, and sends flags to the host."""

    def beside(self) -> AbstractContextManager[None]:
        """Run the block's device work on the side stream, after all earlier work of the current stream."""
        ...

    def join(self) -> None:
        """Make the current stream, not the host, wait for the work launched in `beside`."""
        ...

    def send(self, flags: torch.Tensor) -> SentFlags:
        """Start copying `flags`, bool (width,), to the host, after the earlier work of the current stream.

        The current stream is the side stream inside `beside`, and the generating stream elsewhere.
        """
        ...


OpenChannel = Callable[[torch.device, int, int], FlagChannel | None]
"""Takes device, width and the maximum copies in flight; returns a channel, or None if none is needed."""


def open_channel(device: torch.device, width: int, in_flight: int) -> FlagChannel | None:
    """The channel of a CUDA device; None for any other device, where nothing is late."""
    return CudaFlagChannel(device, width, in_flight) if device.type == "cuda" else None


class CudaFlagChannel:
    """A side stream, and pinned buffers of `width` flags used in turn, for at most `in_flight` copies."""

    def __init__(self, device: torch.device, width: int, in_flight: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # One more than may be in flight: the sender reads the oldest flags before their buffer is reused.
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
    """Tensors that the side stream reads, kept alive until then so that their memory is not reused."""


class FinishTracker:
    """Sends one flag a step, `width` flags in one copy, and finds the first step whose flag was set.

    The host learns of a finish at most `width * (in_flight + 1) - 1` steps late. For more than `in_flight` copies the
    host waits; both numbers are at least 1. If steps `can_fail`, each copy has one flag more, and so has the channel.
    """

    def __init__(
        self, channel: FlagChannel, device: torch.device, *, width: int, in_flight: int, can_fail: bool = False
    ) -> None:
        self._channel = channel
        self._in_flight = in_flight
        self._can_fail = can_fail
        self._flags = torch.zeros(width + can_fail, dtype=torch.bool, device=device)
        self._places = self._flags.unbind()
        self._width = width
        self._inputs: list[Any] = []
        self._sent: deque[_Sent] = deque()
        self._last_length = 0
        self.finished_at: int | None = None
        """Length of the sequences when the last row stopped; None until the host knows."""
        self.failed = False
        """Whether a step failed, as far as the host knows."""

    def record(self, finished: torch.Tensor, length: int, *inputs: Any, failed: torch.Tensor | None = None) -> bool:
        """Record the flag of one step, on the current stream.

        Args:
            finished: bool (batch,), rows that have stopped at this step or before.
            length: of the sequences at this step.
            inputs: the tensors that `finished` was computed from, if another stream frees them.
            failed: bool (1,), whether this step or one before it failed; required if steps can fail, else unused. A
                failed step must stop all rows.

        Returns:
            Whether flags were sent. Only then can `poll` find something new.
        """
        self._last_length = length
        if self._can_fail:
            assert failed is not None
            self._places[-1].copy_(failed[0])
        elif self._width == finished.numel() == 1:
            self._inputs.append((finished, *inputs))
            self._send(finished)  # one flag needs no reduction
            return True
        torch.all(finished, dim=0, out=self._places[len(self._inputs)])
        self._inputs.append((finished, *inputs))
        full = len(self._inputs) == self._width
        if full:
            self._send(self._flags)
        return full

    def poll(self) -> None:
        """Read the flags that have arrived, without waiting for the rest."""
        while self.finished_at is None and self._sent and self._sent[0].arrival.arrived():
            self._read()

    def drain(self) -> int | None:
        """Wait for all recorded flags, or until a set flag is found; return `finished_at`."""
        if self.finished_at is None and self._inputs:
            with self._channel.beside():
                self._send(self._flags)
        while self.finished_at is None and self._sent:
            self._read()
        return self.finished_at

    def _send(self, flags: torch.Tensor) -> None:
        if len(self._sent) == self._in_flight:
            self._read()
        first = self._last_length - len(self._inputs) + 1
        self._sent.append(_Sent(self._channel.send(flags), first, self._inputs))
        self._inputs = []

    def _read(self) -> None:
        sent = self._sent.popleft()
        # A partly filled copy ends with old flags; if one of those were set, an earlier copy would have shown it.
        flags = sent.arrival.wait()
        if self._can_fail:
            self.failed = flags.pop()
        if self.finished_at is None and any(flags):
            self.finished_at = sent.first_length + flags.index(True)
