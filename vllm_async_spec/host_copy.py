"""Host copies of device tensors, and rings of pinned buffers for asynchronous copies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.streams import counted_wait
from vllm_async_spec.sync_policy import HostSyncWarning, ReadKind, calling_site, host_read


class Epoch:
    """Counts changes of device state: a host copy stays valid until `advance` is called.

    PyTorch can't tell: inference tensors have no version counter, and kernels write through raw pointers. Code that
    creates an epoch promises to call `advance` after each change of the tensors that the epoch covers.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
        """Changes so far."""

    def advance(self) -> None:
        """Report a change of device state: every earlier host copy becomes stale."""
        self.count += 1


class HostCopy:
    """The value of a device tensor on the host, exact when it is returned.

    Without an epoch each `read` copies, because nothing can prove an earlier value current. With an epoch, a value is
    kept until the epoch advances or the tensor's version counter changes. Callers share the kept tensor, so they must
    not write to it.

    Args:
        source: device tensor, any shape and dtype. The constructor does not copy it.
        name: name of `source` in the reports.
        given: the value, if the caller already knows it (host, same shape and dtype); used only with an epoch.
        epoch: advances when `source` changes.
    """

    __slots__ = ("_at", "_host", "_pending", "epoch", "name", "source")

    def __init__(
        self, source: torch.Tensor, name: str, *, given: torch.Tensor | None = None, epoch: Epoch | None = None
    ) -> None:
        self.source = source
        self.name = name
        self.epoch = epoch
        self._host = given
        self._pending: _Pending | None = None
        self._at = self._now()
        if given is not None and epoch is None:
            _warn_unused(f"the value given for {name} is not used")

    def __reduce__(self) -> tuple[Any, ...]:
        """What `copy` and `pickle` make anew: a copied tensor counts its versions from zero, so the old proof fails."""
        return _of_copy, (self.source, self.name, self.known, self.epoch)

    @property
    def known(self) -> torch.Tensor | None:
        """The value, if it is on the host and provably current; else None. Never waits, never copies."""
        self._forget_if_stale()
        return self._host

    def read(self) -> torch.Tensor:
        """The current value on the host; copies, and so waits for the device, only if the value is not `known`.

        Raises:
            HostSyncError: a copy was needed and the policy is `error`.
        """
        self._forget_if_stale()
        if self._host is not None:
            return self._host
        if self._pending is not None:
            host = self._pending.wait(self.name)
        else:
            with host_read(self.name, self.source.nbytes):
                # copy=True: on a CPU "device" too, the value must not change when the device tensor does.
                host = self.source.to("cpu", copy=True)
        self._host, self._pending = host if _holds_values(host) else None, None
        return host

    def prefetch(self) -> None:
        """Start the copy on a side stream into pinned memory, so that a later `read` waits for its event only.

        Does nothing if the value is known or its copy is under way. Without an epoch the value could not be used, so no
        copy starts, and a `HostSyncWarning` says so.
        """
        self._forget_if_stale()
        if self.epoch is None:
            _warn_unused(f"{self.name} is not prefetched")
        elif self._host is None and self._pending is None:
            pending = _Pending.start(self.source)
            self._pending = pending if _holds_values(pending.host) else None

    def _forget_if_stale(self) -> None:
        now = self._now()
        if now is None or now != self._at:
            self._host, self._pending, self._at = None, None, now

    def _now(self) -> tuple[int, int] | None:
        """A value that changes with `source`; None without an epoch, because then a change can go unseen."""
        if self.epoch is None:
            return None
        return self.epoch.count, 0 if self.source.is_inference() else self.source._version


def _of_copy(source: torch.Tensor, name: str, known: torch.Tensor | None, epoch: Epoch | None) -> HostCopy:
    return HostCopy(source, name, given=known, epoch=epoch)


def _holds_values(host: torch.Tensor) -> bool:
    """Whether a copy may be kept: one made under a FakeTensorMode has no values, and a later read may be outside it."""
    return type(host) is torch.Tensor


def _warn_unused(what: str) -> None:
    """Warn at the calling line outside this package's machinery."""
    site = calling_site()
    message = (
        f"{what}, because no Epoch was given, so each read copies; give an Epoch that advances when the tensor changes"
    )
    warnings.warn_explicit(message, HostSyncWarning, site.file, site.line)


@dataclass(slots=True)
class _Pending:
    """A copy under way: `host` holds the value once `event` has happened, or at once if `event` is None (CPU)."""

    host: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def start(cls, source: torch.Tensor) -> _Pending:
        if source.device.type != "cuda":
            return cls(source.to("cpu", copy=True), None)
        # A snapshot, because the caller's stream may change `source` in place while the side stream still copies.
        snapshot = source.clone(memory_format=torch.contiguous_format)
        side = _side_stream(source.device)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            # PyTorch's pinned allocator fences the block by events of its own, so a block whose HostCopy
            # was dropped early is not handed out again before this copy has run.
            host = torch.empty(snapshot.shape, dtype=snapshot.dtype, device="cpu", pin_memory=True)
            host.copy_(snapshot, non_blocking=True)
            snapshot.record_stream(side)
            event = torch.cuda.Event()
            event.record(side)
        return cls(host, event)

    def wait(self, name: str) -> torch.Tensor:
        with host_read(name, self.host.nbytes, ReadKind.EVENT):
            if self.event is not None:
                self.event.synchronize()
        return self.host


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


class PinnedRing:
    """Pinned host buffers used in turn, each fenced by the event of the last asynchronous copy that touched it.

    A buffer must not be written again before its last copy, to or from the device, has run. `next` hands out the
    oldest buffer; if that copy has not run yet, `next` waits and counts the wait.

    Args:
        shape: shape of each buffer.
        dtype: dtype of each buffer.
        depth: number of buffers, at least 1. With one more than the steps in flight, `next` never waits.
        device: the device copied to or from; buffers are pinned if it is a CUDA device.

    Raises:
        ValueError: `depth` is less than 1.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, depth: int, device: torch.device | str) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; a PinnedRing needs at least 1 buffer")
        self.device = torch.device(device)
        pinned = self.device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pinned) for _ in range(depth)]
        self._fences: list[torch.cuda.Event | None] = [None] * depth
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._turn = -1

    def next(self) -> torch.Tensor:
        """The oldest buffer, free to be written by the host."""
        self._turn = (self._turn + 1) % len(self._buffers)
        fence = self._fences[self._turn]
        if fence is not None:
            counted_wait(fence, "PinnedRing", self._buffers[self._turn].nbytes)
        self._fences[self._turn] = None
        return self._buffers[self._turn]

    def fence(self) -> torch.cuda.Event | None:
        """Record an event on the current stream, after the launch of the copy that uses the last `next` buffer.

        Returns:
            The event, to wait for the buffer's value; None on the CPU. The buffer's next turn records the same event
            again, because creating an event costs more than recording one.
        """
        if self.device.type != "cuda":
            return None
        event = self._events[self._turn]
        if event is None:
            event = self._events[self._turn] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._fences[self._turn] = event
        return event
