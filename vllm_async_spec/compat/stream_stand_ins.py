"""Stand-ins for CUDA's streams and events on a simulated device: the host waits only in `synchronize`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_async_spec.audit.report import WaitKind
from vllm_async_spec.patching import temporarily

_Tell = Callable[[WaitKind, str], None]


@contextlib.contextmanager
def stand_in_streams(tell: _Tell, device: torch.device) -> Iterator[None]:
    """Make `torch.cuda` and `torch.accelerator` return this file's streams and events, and `tell` of waits for them.

    In PyTorch's CPU build these functions raise, so a builder that calls one could not be judged. The replacements do
    nothing but report, since a simulated device finishes all work at once.
    """
    event = type("Event", (_Event,), {"tell": staticmethod(tell)})
    stream = type("Stream", (_Stream,), {"tell": staticmethod(tell), "event": event, "device": device})

    def synchronize(device: Any = None) -> None:
        tell(WaitKind.DEVICE, "synchronize")

    def current_stream(device: Any = None) -> Any:
        return stream()

    stands_for = {"Event": event, "Stream": stream, "synchronize": synchronize}
    stands_for |= dict.fromkeys(("current_stream", "default_stream"), current_stream)
    with temporarily() as changes:
        changes.set(torch, "Event", event)
        changes.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
        for module in (torch.cuda, getattr(torch, "accelerator", None)):
            for name, value in stands_for.items():
                if hasattr(module, name):
                    changes.set(module, name, value)
        yield


class _Done:
    """Stand-in whose work is all done: the host waits only in `synchronize`, which tells so."""

    tell: _Tell
    kind: WaitKind

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments, such as a device, timing or a priority."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.tell(self.kind, "synchronize")


class _Event(_Done):
    """Stand-in for `torch.Event` and `torch.cuda.Event`."""

    kind = WaitKind.EVENT

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class _Stream(_Done):
    """Stand-in for `torch.cuda.Stream`."""

    kind = WaitKind.STREAM
    event: type[_Event]
    device: torch.device
    cuda_stream = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or self.event()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...
