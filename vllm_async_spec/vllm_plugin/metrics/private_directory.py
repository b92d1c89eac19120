"""Directories that this plugin made for one user. A marker file identifies them, never a name.

A private directory is no link, belongs to this user, only this user can write to it, and its marker has its name. The
plugin uses, changes and removes no other directory, and removes a private one file by file. Reads go through an open
descriptor, so that a directory swapped in meanwhile is not mistaken for the first.
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
    """Make a private directory with a unique name in `parent`, which need not be private.

    `name` is written into the marker, if the directory is about to be renamed.

    Returns:
        The directory, and a descriptor. The directory is in use while any process has this descriptor open.

    Raises:
        OSError: the directory can't be made, marked or kept from other users. It is removed.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # with mode 0700
    marked = path.with_name(name or path.name)
    descriptor = os.open(path, _DIRECTORY)
    try:
        _hold(descriptor)  # before marking, because a marked directory without a lock counts as abandoned
        _mark(descriptor, marked.name)
        _check(descriptor, marked)
    except OSError:
        _undo(path, descriptor)
        raise
    return path, descriptor


def make_shared(path: Path) -> int:
    """Open the private directory at `path`, and make it if nothing exists there.

    Returns:
        A descriptor, as from `make`.

    Raises:
        OSError: `path` exists and is not private, or the directory can't be made.
    """
    if not os.path.lexists(path):
        fresh, descriptor = make(path.parent, f"{path.name}.", path.name)
        try:
            fresh.rename(path)  # already marked, so that no process ever finds it without its marker
        except OSError:  # another process was faster
            _undo(fresh, descriptor)
        else:
            return descriptor
    return hold(path)


def hold(path: Path) -> int:
    """Open a private directory.

    Returns:
        A descriptor, as from `make`.

    Raises:
        OSError: the directory does not exist, or is not private.
    """
    descriptor = _open(path)
    _hold(descriptor)
    return descriptor


def remove(path: Path, files: re.Pattern[str], *, abandoned: bool) -> None:
    """Remove a private directory and the plugin's files in it. If it has anything else, change nothing.

    `files` matches the names of the plugin's files.

    Raises:
        OSError: the directory is not private, contains anything else, or is in use with `abandoned` set.
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
                raise OSError(f"{path} contains {name!r}, which vllm-async-spec did not write")
        for name in (*names, MARKER):
            os.unlink(name, dir_fd=descriptor)
        try:
            os.rmdir(path.name, dir_fd=parent)
        except OSError:  # another process wrote a file meanwhile
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
    with contextlib.suppress(OSError):  # without file locks, abandoned directories are never removed either
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
    """Whether this is a regular file of this user with one name, and so no link to another file."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _undo(path: Path, descriptor: int) -> None:
    """Remove a directory that `make` has just made."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARKER, dir_fd=descriptor)
    os.close(descriptor)
    path.rmdir()
