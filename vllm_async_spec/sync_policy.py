"""The sync policy: what a host read of device state does, and a report of the reads by call site.

Every read that makes the host wait for the device goes through `host_read`, which counts it by call site. The policy
then allows the read, warns once per site, or refuses the read before it happens. Reads of CPU tensors count as they
would on a GPU, so that tests need no GPU.

Counters are per process. A forked child starts at zero.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any


class SyncPolicy(str, enum.Enum):
    """What happens when the host reads device state."""

    ALLOW = "allow"
    """Count the read."""
    WARN = "warn"
    """Count the read, and warn once per call site, at the caller's file and line."""
    ERROR = "error"
    """Count the read, and raise `HostSyncError` before anything is copied."""

    @classmethod
    def parse(cls, value: str | SyncPolicy) -> SyncPolicy:
        """The policy named by `value`.

        Raises:
            ValueError: `value` names no policy; the message lists those that exist.
        """
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(policy.value for policy in cls)
            raise ValueError(f"sync policy is {str(value)!r}; it must be one of {known}") from None


class ReadKind(str, enum.Enum):
    """How the host waited."""

    COPY = "copy"
    """A blocking device-to-host copy."""
    EVENT = "event"
    """A wait for the event of a copy started earlier; any wait left is short and intended."""


class HostSyncError(RuntimeError):
    """A read of device state from the host under the policy `error`."""


class HostSyncWarning(UserWarning):
    """A read of device state from the host under the policy `warn`."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """The line outside this package's machinery that made the read."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(slots=True)
class SiteReport:
    """What one call site cost: `count` reads, `bytes` copied, `seconds` the host waited."""

    site: CallSite
    what: str
    kind: ReadKind
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The host reads of this process since it started or was last reset; sites by waiting time, longest first."""

    policy: SyncPolicy
    sites: tuple[SiteReport, ...] = field(default=())
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Batches that waited because a request needs exact host counts, by reason."""

    @property
    def count(self) -> int:
        """Reads in all."""
        return sum(site.count for site in self.sites)

    @property
    def bytes(self) -> int:
        """Bytes copied to the host in all."""
        return sum(site.bytes for site in self.sites)

    @property
    def seconds(self) -> float:
        """Seconds that host threads waited in all."""
        return sum(site.seconds for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "policy": self.policy.value,
            "count": self.count,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "fallbacks": self.fallbacks,
            "sites": [asdict(site) | {"kind": site.kind.value} for site in self.sites],
        }


_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# Frames of these files carry out a read and are never its call site.
_MACHINERY = frozenset(
    os.path.join(_PACKAGE, name)
    for name in ("sync_policy.py", "host_copy.py", "host_lengths.py", "metadata.py", "streams.py")
) | {contextlib.__file__, dataclasses.__file__}

_lock = threading.Lock()
_sites: dict[tuple[CallSite, str, ReadKind], SiteReport] = {}
_fallbacks: Counter[str] = Counter()
_warned: set[tuple[CallSite, str]] = set()
_first_count: Callable[[], None] | None = None
_process_policy = SyncPolicy.ALLOW
_scoped_policy: contextvars.ContextVar[SyncPolicy | None] = contextvars.ContextVar("sync_policy", default=None)


def current_sync_policy() -> SyncPolicy:
    """The policy in force here: that of the innermost `sync_policy` block of this thread, else the process's."""
    return _scoped_policy.get() or _process_policy


def set_sync_policy(policy: str | SyncPolicy) -> SyncPolicy:
    """Set the policy of the whole process and return the one it replaces.

    Raises:
        ValueError: `policy` names no policy.
    """
    global _process_policy
    new = SyncPolicy.parse(policy)
    with _lock:
        previous, _process_policy = _process_policy, new
    return previous


@contextlib.contextmanager
def sync_policy(policy: str | SyncPolicy) -> Iterator[SyncPolicy]:
    """Within the block, and in this thread only, `policy` is in force.

    Raises:
        ValueError: `policy` names no policy.
    """
    token = _scoped_policy.set(SyncPolicy.parse(policy))
    try:
        yield current_sync_policy()
    finally:
        _scoped_policy.reset(token)


def sync_report() -> SyncReport:
    """The host reads of device state in this process so far."""
    with _lock:
        sites = sorted((_copy(site) for site in _sites.values()), key=lambda site: -site.seconds)
        fallbacks = dict(_fallbacks)
    return SyncReport(current_sync_policy(), tuple(sites), fallbacks)


def reset_sync_report() -> SyncReport:
    """Forget the reads counted so far, and return them; sites that have been warned about may warn again."""
    with _lock:
        sites = sorted(_sites.values(), key=lambda site: -site.seconds)
        fallbacks = dict(_fallbacks)
        _sites.clear()
        _fallbacks.clear()
        _warned.clear()
    return SyncReport(current_sync_policy(), tuple(sites), fallbacks)


def on_first_count(action: Callable[[], None]) -> None:
    """Call `action` once, as soon as this process has counted anything: now, or in the thread that counts first.

    A forked child has counted nothing and does not inherit its parent's `action`.
    """
    global _first_count
    with _lock:
        began = bool(_sites or _fallbacks)
        _first_count = None if began else action
    if began:
        action()


def record_fallback(reason: str) -> None:
    """Count one batch that waits because one of its requests needs exact host counts.

    Args:
        reason: the feature that needs them, such as `min_tokens`: one of a few fixed names, never request data.
    """
    with _lock:
        _fallbacks[reason] += 1
    if _first_count is not None:
        _announce_first_count()


@contextlib.contextmanager
def host_read(what: str, nbytes: int, kind: ReadKind = ReadKind.COPY) -> Iterator[None]:
    """Count, time and attribute to the caller one read of device state, which the block carries out.

    Args:
        what: name of what is read, such as `seq_lens`.
        nbytes: bytes that reach the host.
        kind: `COPY` is subject to the policy; `EVENT` is only counted.

    Raises:
        HostSyncError: the policy is `error` and `kind` is `COPY`; nothing has been copied.
    """
    site = calling_site()
    policy = current_sync_policy() if kind is ReadKind.COPY else SyncPolicy.ALLOW
    refused = policy is SyncPolicy.ERROR
    _count(site, what, kind, 0 if refused else nbytes)
    if refused:
        raise HostSyncError(f"{_sentence(what, site)}, which the sync policy 'error' forbids; {_REMEDY}")
    if policy is SyncPolicy.WARN:
        _warn_once(site, what)
    start = time.perf_counter()
    try:
        yield
    finally:
        _add_seconds(site, what, kind, time.perf_counter() - start)


_REMEDY = "use the device tensor or seq_lens_cpu_upper_bound"


def _sentence(what: str, site: CallSite) -> str:
    return f"a blocking host read of {what} at {site} makes the host wait for the device"


def _count(site: CallSite, what: str, kind: ReadKind, nbytes: int) -> None:
    with _lock:
        entry = _sites.setdefault((site, what, kind), SiteReport(site, what, kind))
        entry.count += 1
        entry.bytes += nbytes
    if _first_count is not None:
        _announce_first_count()


def _add_seconds(site: CallSite, what: str, kind: ReadKind, seconds: float) -> None:
    with _lock:
        # A reset during the read removed its entry; its time is then dropped.
        if entry := _sites.get((site, what, kind)):
            entry.seconds += seconds


def _announce_first_count() -> None:
    global _first_count
    with _lock:
        action, _first_count = _first_count, None
    if action is not None:  # else another thread was first
        action()


def _start_at_zero() -> None:
    """Reset a forked child: its counts are the parent's, and a thread of the parent may hold the lock."""
    global _lock, _first_count
    _lock, _first_count = threading.Lock(), None
    _sites.clear()
    _fallbacks.clear()


os.register_at_fork(after_in_child=_start_at_zero)


def _warn_once(site: CallSite, what: str) -> None:
    with _lock:
        if (site, what) in _warned:
            return
        _warned.add((site, what))
    message = f"{_sentence(what, site)}, and is counted; {_REMEDY}"
    warnings.warn_explicit(message, HostSyncWarning, site.file, site.line, registry={})


def calling_site() -> CallSite:
    """The line that made the call, outside this package's machinery."""
    frame = sys._getframe(1)
    while _is_machinery(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _is_machinery(code: CodeType) -> bool:
    # A dataclass's generated __init__ has no file.
    return code.co_filename in _MACHINERY or (code.co_filename, code.co_name) == ("<string>", "__init__")


def _copy(site: SiteReport) -> SiteReport:
    return SiteReport(site.site, site.what, site.kind, site.count, site.bytes, site.seconds)
