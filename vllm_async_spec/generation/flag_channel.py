"""The way of stop flags from the device to the host, and the stream beside the one that generates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

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
