"""One device tensor's value on the host, and the pinned buffers that carry such values across steps."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_async_spec.sync_policy import ReadKind, host_read


class Upkeep(enum.Enum):
    """Which host values the caller himself renews, or drops, whenever he changes the device tensor.

    Those are trusted whatever the version counter says: vLLM's drafters first add to `seq_lens`, then to its shadow.
    """

    NONE = "none"
    """None: whatever the device tensor's version counter shows to be old is dropped."""
    GIVEN = "given"
    """Those that he gave."""
    ALL = "all"
    """Those that he gave, and those that were copied because he asked."""


class HostCopy:
    """The value of a device tensor on the host: copied when first asked for, at most once, and never when stale.

    The tensor's version counter tells whether it was changed in place since. Two writers escape it: kernels that
    write through a raw pointer (call `drop` after them), and any write to an inference tensor, which has no counter;
    the copy of an inference tensor is therefore kept only where there is `upkeep`.

    Args:
        source: device tensor, any shape and dtype. It is not copied here.
        name: what the reports call it.
        given: its value, where the caller knows it already (host, same shape and dtype).
        upkeep: which host values the caller renews himself.
    """

    __slots__ = (
        "_derive",
        "_host",
        "_parent",
        "_parent_version",
        "_pending",
        "_trusted",
        "_upkeep",
        "_version",
        "name",
        "source",
    )

    def __init__(
        self, source: torch.Tensor, name: str, *, given: torch.Tensor | None = None, upkeep: Upkeep = Upkeep.NONE
    ) -> None:
        self.source = source
        self.name = name
        self._host = given
        self._upkeep = upkeep
        self._trusted = given is not None and upkeep is not Upkeep.NONE
        self._version = _version(source)
        self._pending: _Pending | None = None
        self._parent: HostCopy | None = None
        self._parent_version: int | None = None
        self._derive: Callable[[torch.Tensor], torch.Tensor] | None = None

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether the value that this copy holds, or would fetch, is that of `tensor`."""
        return tensor is self.source or self._trusted

    def derived(self, source: torch.Tensor, derive: Callable[[torch.Tensor], torch.Tensor]) -> HostCopy:
        """The host copy of `source`, a device tensor computed from this one's, sharing this one's single copy.

        Args:
            source: what the same computation gave on the device.
            derive: computes the host value of `source` from the host value of `self.source`.
        """
        self._forget_if_stale()
        child = HostCopy(source, self.name, upkeep=self._upkeep)
        child._parent, child._parent_version, child._derive = self, self._version, derive
        return child

    @property
    def known(self) -> torch.Tensor | None:
        """The current value if it is on the host already, else None. Never waits, never copies."""
        self._forget_if_stale()
        if self._host is None and self._parent_is_usable():
            assert self._parent is not None
            assert self._derive is not None
            if (host := self._parent.known) is not None:
                self._host = self._derive(host)
        return self._host

    def read(self) -> torch.Tensor:
        """The current value on the host; copies, and so waits for the device, only where it is not `known`.

        Raises:
            HostSyncError: a copy was needed and the policy is `error`.
        """
        if (host := self.known) is not None:
            return host
        if self._parent_is_usable():
            assert self._parent is not None
            assert self._derive is not None
            host = self._derive(self._parent.read())
        elif self._pending is not None:
            host = self._pending.wait(self.name)
        else:
            with host_read(self.name, self.source.nbytes):
                # copy=True: on a CPU "device" too, the value must not change when the device tensor does.
                host = self.source.to("cpu", copy=True)
        if self._version is not None or self._upkeep is not Upkeep.NONE:
            self._host = host
            self._trusted = self._upkeep is Upkeep.ALL
        self._pending = None
        return host

    def prefetch(self) -> None:
        """Start the copy on a side stream into pinned memory, so that a later `read` waits for its event only.

        Does nothing where the value is known or on its way. The value copied is that of now: a later change in place
        makes it stale like any other.
        """
        if self.known is not None or self._pending is not None:
            return
        if self._parent_is_usable():
            assert self._parent is not None
            self._parent.prefetch()
        else:
            self._pending = _Pending.start(self.source)

    def drop(self) -> None:
        """Forget the host value: for kernels that changed `source` in a way its version counter does not show."""
        self._host = self._pending = self._parent = None
        self._trusted = False
        self._version = _version(self.source)

    def _parent_is_usable(self) -> bool:
        parent = self._parent
        return parent is not None and (parent._trusted or self._parent_version == _version(parent.source))

    def _forget_if_stale(self) -> None:
        if not self._trusted and self._version != _version(self.source):
            self.drop()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass(slots=True)
class _Pending:
    """A copy under way: `host` holds the value once `event` has happened (None on the CPU: it has)."""

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
            host = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
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

    A buffer that the host fills for a copy to the device, or that a copy from the device fills, must not be written
    again before that copy has run. `next` hands out the oldest buffer and waits, counted, where its copy has not.

    Args:
        shape: shape of each buffer.
        dtype: dtype of each buffer.
        depth: number of buffers, at least 1: one more than the steps that may be in flight never waits.
        device: the device copied to or from; buffers are pinned if it is a CUDA device.

    Raises:
        ValueError: `depth` is less than 1.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, depth: int, device: torch.device | str) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; a PinnedRing needs at least 1 buffer")
        self.device = torch.device(device)
        pinned = self.device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(depth)]
        self._fences: list[torch.cuda.Event | None] = [None] * depth
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._turn = -1

    def next(self) -> torch.Tensor:
        """The buffer whose turn it is, free to be written by the host."""
        self._turn = (self._turn + 1) % len(self._buffers)
        fence = self._fences[self._turn]
        if fence is not None and not fence.query():
            buffer = self._buffers[self._turn]
            with host_read("PinnedRing", buffer.nbytes, ReadKind.EVENT):
                fence.synchronize()
        self._fences[self._turn] = None
        return self._buffers[self._turn]

    def fence(self) -> torch.cuda.Event | None:
        """Record, on the current stream, that the copy just launched with the last `next` buffer ends here.

        Returns:
            The event, for those who wait for the buffer's value; None on the CPU. The buffer's next turn records it
            again, because to make one costs more than to record it.
        """
        if self.device.type != "cuda":
            return None
        event = self._events[self._turn]
        if event is None:
            event = self._events[self._turn] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._fences[self._turn] = event
        return event
