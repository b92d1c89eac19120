"""When did every row stop? Asked of flags that reach the host steps after the device has written them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.flag_channel import FlagChannel, SentFlags


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
