"""The directory in which the processes of one server leave their snapshots for the one that is asked for metrics."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from vllm_async_spec.vllm_plugin.log import is_main_process

VARIABLE = "ASYNC_SPEC_RUN_DIRECTORY"
"""Names it to the processes that this one starts. vLLM warns about each VLLM_ variable that is not its own."""

_PREFIX = "vllm-async-spec-"
_YOUNG = 60.0
"""Seconds within which a directory may not be locked yet."""


def run_directory() -> Path:
    """The directory of this server: what the parent process names, or else a new one, which ends with this process.

    A process that multiprocessing did not start is a server of its own, whatever environment it was started in.

    Raises:
        OSError: a new one can't be made.
    """
    inherited = os.environ.pop(VARIABLE, None)
    if inherited is None or is_main_process():
        directory = _make()
        atexit.register(_remove, directory, os.getpid())
    else:
        directory = Path(inherited)
    os.environ[VARIABLE] = str(directory)
    return directory


def _make() -> Path:
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))  # which gives it the mode 0700
    with contextlib.suppress(OSError):  # a file system without locks, on which nobody removes anything either
        # Held open, and so locked, until this process and those that it forked have ended, however they end.
        _lock(directory)
    _remove_abandoned(directory.parent)
    return directory


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends by itself runs this too
        shutil.rmtree(directory, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what servers left behind that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = directory.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if ours and time.time() - found.st_mtime > _YOUNG:
                os.close(_lock(directory))
                shutil.rmtree(directory)


def _lock(directory: Path) -> int:
    """A descriptor that locks it.

    Raises:
        BlockingIOError: another process does.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
