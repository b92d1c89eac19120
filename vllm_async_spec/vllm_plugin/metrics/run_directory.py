"""The run directory, where all processes of one server write snapshots for the process that serves `/metrics`.

Its path is `vllm-async-spec.UID/run-*` below the temporary directory. Both directories are private.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import tempfile
from pathlib import Path

from vllm_async_spec.vllm_plugin.log import is_main_process, logger
from vllm_async_spec.vllm_plugin.metrics import private_directory

VARIABLE = "ASYNC_SPEC_RUN_DIRECTORY"
"""Passes the directory to child processes. No VLLM_ prefix, because vLLM warns about unknown VLLM_ variables."""

_PREFIX = "run-"
_FILES = re.compile(r"[0-9]+-[0-9a-f]{8}\.(json|tmp)|[0-9a-f]{16}\.said")


def snapshot_path(directory: Path) -> Path:
    """The path of this process's snapshot. An incomplete file has the suffix `.tmp`."""
    # The token is needed because files outlive their processes, and the system may reuse a process ID.
    return directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"


def said_path(directory: Path, sentence: str) -> Path:
    """The file that exists once a process of the server has logged `sentence`."""
    return directory / f"{hashlib.sha256(sentence.encode()).hexdigest()[:16]}.said"


def run_directory() -> Path:
    """This server's directory: the one that the parent process passed on, or a new one, removed with this process.

    A process that multiprocessing did not start is a new server, even if its environment names a directory.

    Raises:
        OSError: a new directory can't be made.
    """
    inherited = os.environ.pop(VARIABLE, None)
    directory = None if inherited is None or is_main_process() else _joined(inherited)
    if directory is None:
        directory = _made()
        atexit.register(_remove, directory, os.getpid())
    os.environ[VARIABLE] = str(directory)
    return directory


def _joined(inherited: str) -> Path | None:
    """The inherited directory, now held by this process too; None with a warning if it can't be used."""
    try:
        private_directory.hold(Path(inherited))
    except OSError as error:
        logger.warning(
            "vllm-async-spec: /metrics lacks the counts of process %d, because %s is %r: %s; unset the variable",
            os.getpid(),
            VARIABLE,
            inherited,
            error,
        )
        return None
    return Path(inherited)


def _made() -> Path:
    parent = Path(tempfile.gettempdir(), f"vllm-async-spec.{os.geteuid()}")
    try:
        private_directory.make_shared(parent)
    except OSError as error:
        directory, _ = private_directory.make(parent.parent, f"{parent.name}.{_PREFIX}")
        logger.warning(
            "vllm-async-spec: %s; move that path away. Until then the counts of a server's processes are in a "
            "directory that stays if the server is killed: %s",
            error,
            directory,
        )
        return directory
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            private_directory.remove(path, _FILES, abandoned=True)
    directory, _ = private_directory.make(parent, _PREFIX)
    return directory


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # forked children run this exit handler too
        with contextlib.suppress(OSError):
            private_directory.remove(directory, _FILES, abandoned=False)
