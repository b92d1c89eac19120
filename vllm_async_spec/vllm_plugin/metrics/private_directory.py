"""Directories that this plugin made for one user: told by a marker, never by name, and removed file by file.

A directory is private if it is a real directory, belongs to this user, can be written by nobody else, and has a marker
that names it. Nothing else is ever used, changed or removed. All of it is read through an open descriptor, so that a
directory which takes another's place meanwhile is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path

MARKER = "made-by-vllm-async-spec"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def make(parent: Path, prefix: str, name: str = "") -> tuple[Path, int]:
    """Make a private directory with a name of its own.

    Args:
        parent: where; it need not be private.
        prefix: what its name begins with.
        name: what its marker names, if it is about to be renamed.

    Returns:
        The directory, and a descriptor. While that is open, in any process that inherited it, the directory is in use.

    Raises:
        OSError: it can't be made, marked or kept from other users; nothing is left of it.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # which gives it the mode 0700
    marked = path.with_name(name or path.name)
    descriptor = os.open(path, _DIRECTORY)
    try:
        _hold(descriptor)  # before it is marked: a marked directory that nobody holds is abandoned
        _mark(descriptor, marked.name)
        _check(descriptor, marked)
    except OSError:
        _undo(path, descriptor)
        raise
    return path, descriptor


def make_shared(path: Path) -> int:
    """Open the private directory of this name, and make it if nothing has the name.

    Returns:
        A descriptor, as that of `make`.

    Raises:
        OSError: what has the name is not private, or it can't be made.
    """
    if not os.path.lexists(path):
        fresh, descriptor = make(path.parent, f"{path.name}.", path.name)
        try:
            fresh.rename(path)  # marked already, so that no other process finds it without its marker
        except OSError:  # another process was faster
            _undo(fresh, descriptor)
        else:
            return descriptor
    return hold(path)


def hold(path: Path) -> int:
    """Open a private directory.

    Returns:
        A descriptor, as that of `make`.

    Raises:
        OSError: it is not private, or not there.
    """
    descriptor = _open(path)
    _hold(descriptor)
    return descriptor


def remove(path: Path, files: re.Pattern[str], *, abandoned: bool) -> None:
    """Remove a private directory and the files in it that the plugin wrote; with anything else in it, change nothing.

    Args:
        path: the directory.
        files: the names of these files.
        abandoned: whether to remove it only if it is not in use.

    Raises:
        OSError: it is not private, or in use, or has anything else in it.
    """
    with contextlib.ExitStack() as stack:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, parent)
        descriptor = _open(path, parent)
        stack.callback(os.close, descriptor)
        if abandoned:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = [name for name in os.listdir(descriptor) if name != MARKER]
        for name in names:
            if not (files.fullmatch(name) and _is_our_file(os.stat(name, dir_fd=descriptor, follow_symlinks=False))):
                raise OSError(f"{path} has {name!r}, which vllm-async-spec did not write")
        for name in (*names, MARKER):
            os.unlink(name, dir_fd=descriptor)
        try:
            os.rmdir(path.name, dir_fd=parent)
        except OSError:  # a process has written meanwhile
            _mark(descriptor, path.name)
            raise


def _open(path: Path, parent: int | None = None) -> int:
    descriptor = os.open(path if parent is None else path.name, _DIRECTORY, dir_fd=parent)
    try:
        _check(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not _is_marked(descriptor, path.name):
        raise OSError(f"{path} is not a directory that vllm-async-spec made for this user alone")


def _hold(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks, on which nobody removes what is abandoned either
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _text(name: str) -> bytes:
    return os.fsencode(f"vllm-async-spec made {name}, and removes it with the files that it wrote here.\n")


def _mark(descriptor: int, name: str) -> None:
    marker = os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor)
    with open(marker, "wb") as file:
        file.write(_text(name))


def _is_marked(descriptor: int, name: str) -> bool:
    try:
        marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    except OSError:
        return False
    try:
        return _is_our_file(os.fstat(marker)) and os.read(marker, 1024) == _text(name)
    finally:
        os.close(marker)


def _is_our_file(found: os.stat_result) -> bool:
    """Whether it is a plain file of this user with one name, and so no link to another's."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _undo(path: Path, descriptor: int) -> None:
    """Remove a directory that `make` has just made."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARKER, dir_fd=descriptor)
    os.close(descriptor)
    path.rmdir()
