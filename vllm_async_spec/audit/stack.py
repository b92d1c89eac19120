"""Python call stacks, taken cheaply while recording and made readable afterwards."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

from vllm_async_spec.audit.report import Frame

RawStack = tuple[tuple[CodeType, int], ...]
"""Innermost first: code and line. Naming a frame costs more than taking it, so names follow after the recording."""

Stack = tuple[tuple[str, int, str], ...]
"""The same as plain data: file, line, function."""

_DEPTH = 14
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(
    os.path.join(_PACKAGE, part)
    for part in ("audit", "sync_policy.py", "host_copy.py", "host_lengths.py", "metadata.py", "vllm_plugin")
)
_LIBRARY = tuple(
    os.path.realpath(path) + os.sep for path in {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]}
)
_SITE = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
_TORCH = os.path.join(os.sep, "site-packages", "torch", "")


def take(depth: int = _DEPTH) -> RawStack:
    """The stack of this thread; the caller's own frame, and others of this package, are dropped by `readable`."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def plain(stack: RawStack) -> Stack:
    """`stack` as data that outlives the process."""
    return tuple((code.co_filename, line, getattr(code, "co_qualname", code.co_name)) for code, line in stack)


def readable(stack: Stack, depth: int = 8) -> tuple[Frame, ...]:
    """Up to `depth` frames outside PyTorch, Python's library and this tool; the first is the line that waited."""
    theirs = [entry for entry in stack if not _is_machinery(entry[0])]
    return tuple(
        Frame(short_path(file), line, function, linecache.getline(file, line).strip())
        for file, line, function in theirs[:depth]
    )


def _is_machinery(file: str) -> bool:
    if file.startswith((*_OURS, "<")) or _TORCH in file:
        return True
    return file.startswith(_LIBRARY) and not any(part in file for part in _SITE)


def short_path(file: str) -> str:
    """The path from the package's name on; outside a package, its last two parts."""
    for part in _SITE:
        if part in file:
            return file.rpartition(part)[2]
    parts = file.split(os.sep)
    for name in ("vllm", "flashinfer", "vllm_async_spec"):
        if name in parts[:-1]:
            return os.sep.join(parts[parts.index(name) :])
    return os.sep.join(parts[-2:])
