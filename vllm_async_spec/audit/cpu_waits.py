"""Reads that would be waits on a GPU, in an engine on a CPU: `host_reads.CpuProbe` with call stacks and events.

The probe follows what the forward computed through every operator of a thread. `CpuWaits` also keeps each read's call
stack, follows the threads that fetch outputs, and understands events. Non-blocking copies made before an event was
recorded become the host's when a thread waits for the event; that wait is counted. A tensor's side can't be seen on a
CPU, so a non-blocking copy within the device counts as a copy to the host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.audit.host_reads import CpuProbe
from vllm_async_spec.audit.stack import RawStack, plain, take
from vllm_async_spec.patching import Transaction


@dataclass(frozen=True, slots=True)
class Read:
    """One read that would be a wait."""

    thread: int
    what: str
    """The method or operator called, such as `item`, `to` or `nonzero`, or `event`."""
    late: bool
    """Whether the value read is of an earlier step than the newest launched one."""
    at: int
    """Nanoseconds since the epoch."""
    stack: RawStack


class CpuWaits(CpuProbe):
    """A `CpuProbe` that keeps each read with its stack; it sees what happens within `following()`, on any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Read] = []
        self._followed = threading.local()
        self._changes = Transaction()
        self._copies: dict[int, torch.Tensor] = {}
        """Targets of non-blocking copies that no thread has waited for, by number."""
        self._copied = 0
        # The thread that fetches outputs waits for copies while the worker makes new ones.
        self._lock = threading.Lock()
        AuditedCpuEvent.waits = self

    def stop(self) -> None:
        """Put everything back."""
        AuditedCpuEvent.waits = None
        self._changes.roll_back()

    @contextlib.contextmanager
    def following(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Follow tensors on this thread; arguments are ignored, and contexts may nest."""
        if getattr(self._followed, "active", False):
            yield
            return
        self._followed.active = True
        try:
            with contextlib.ExitStack() as stack:
                for mode in self.modes():
                    stack.enter_context(mode)
                yield
        finally:
            self._followed.active = False

    def on_device(self, tensor: torch.Tensor, *, unless: Iterable[torch.Tensor | None]) -> None:
        """Treat `tensor` as the device's from now on, unless it shares memory with a tensor in `unless`."""
        storages = {host.untyped_storage()._cdata for host in unless if host is not None}
        if tensor.untyped_storage()._cdata not in storages:
            self.mark(tensor, self._step)

    def read(self, what: str, step: int) -> None:
        """Record a read of a value that depends on `step`."""
        super().read(what, step)
        self.found.append(Read(threading.get_ident(), what, step < self._step, time.time_ns(), take()))

    def copying(self, host: torch.Tensor) -> None:
        """Remember a copy until a thread waits for it."""
        if self.step_of(host) is not None:
            with self._lock:
                self._copied += 1
                self._copies[self._copied] = host

    def recorded(self) -> tuple[int, int]:
        """The newest step and copy number, for an event that is recorded now."""
        return self._step, self._copied

    def waited(self, stands_for: tuple[int, int]) -> None:
        """Count a wait for an event; copies made before the event was recorded become the host's."""
        step, copies = stands_for
        self.read("event", step)
        with self._lock:
            hosts = [self._copies.pop(number) for number in [*self._copies] if number <= copies]
        for host in hosts:
            self._written.pop(host.untyped_storage()._cdata, None)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `stop`."""
        self._changes.set(owner, name, value)

    def adopt(self, event: Any) -> None:
        """Observe an existing event of another stand-in class; waits before its next record are not counted."""
        stands_for: tuple[int, int] | None = None

        def record(*args: Any) -> None:
            nonlocal stands_for
            stands_for = self.recorded()

        def synchronize() -> None:
            if stands_for is not None:
                self.waited(stands_for)

        self.replace(event, "record", record)
        self.replace(event, "synchronize", synchronize)

    def reads_as_data(self) -> list[dict[str, Any]]:
        """The reads, as plain data."""
        return [
            {"thread": r.thread, "what": r.what, "late": r.late, "at": r.at, "stack": plain(r.stack)}
            for r in self.found
        ]


class AuditedCpuEvent:
    """Replaces `torch.Event` on a CPU while audits are possible; reports waits to the audit, and does nothing else."""

    waits: CpuWaits | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stands_for: tuple[int, int] | None = None

    def record(self, *args: Any) -> None:
        """Note the newest step and copy."""
        waits = self.waits  # another thread may end the audit meanwhile
        self._stands_for = waits.recorded() if waits is not None else None

    def synchronize(self) -> None:
        """Report a wait for the work before the event."""
        waits = self.waits
        if waits is not None and self._stands_for is not None:
            waits.waited(self._stands_for)

    def wait(self, *args: Any) -> None:
        """Do nothing: there is one stream."""

    def query(self) -> bool:
        """True: everything is done at once."""
        return True
