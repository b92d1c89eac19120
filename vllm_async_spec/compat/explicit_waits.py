"""Waits that a builder asks for by name where there is no CUDA: for the device, for a stream, for an event.

PyTorch's CPU build has these functions too, and they raise, so that nothing could be said of such a builder but that it
does not run. Within `told` they tell of the wait and do nothing else: what a simulated device does is done at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_async_spec.audit.report import WaitKind
from vllm_async_spec.patching import temporarily

__all__ = ["told"]

Tell = Callable[[WaitKind, str], None]


@contextlib.contextmanager
def told(tell: Tell) -> Iterator[None]:
    """Have `torch.cuda` and `torch.accelerator` make streams and events of this file, and tell of waits for them.

    Args:
        tell: Told of each wait, and what was called.
    """
    event = type("Event", (_Event,), {"tell": staticmethod(tell)})
    stream = type("Stream", (_Stream,), {"tell": staticmethod(tell), "event": event})

    def synchronize(device: Any = None) -> None:
        tell(WaitKind.DEVICE, "synchronize")

    def current_stream(device: Any = None) -> Any:
        return stream()

    stands_for = {"Event": event, "Stream": stream, "synchronize": synchronize, "current_stream": current_stream}
    with temporarily() as changes:
        changes.set(torch, "Event", event)
        for module in (torch.cuda, getattr(torch, "accelerator", None)):
            for name, value in stands_for.items():
                if hasattr(module, name):
                    changes.set(module, name, value)
        yield


class _Event:
    """As `torch.Event` and `torch.cuda.Event`."""

    tell: Tell

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever it is given: of a device, of timing."""

    def record(self, stream: Any = None) -> None:
        """Nothing: what was asked for before is done."""

    def wait(self, stream: Any = None) -> None:
        """Nothing: a stream waits here, and not the host."""

    def query(self) -> bool:
        """True, and the host does not wait for the answer."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.tell(WaitKind.EVENT, "synchronize")


class _Stream:
    """As `torch.cuda.Stream`."""

    tell: Tell
    event: type[_Event]
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever it is given: of a device, of a priority."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or self.event()

    def wait_event(self, event: Any) -> None:
        """Nothing: the stream waits, and not the host."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing: the stream waits, and not the host."""

    def query(self) -> bool:
        """True, and the host does not wait for the answer."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.tell(WaitKind.STREAM, "synchronize")
