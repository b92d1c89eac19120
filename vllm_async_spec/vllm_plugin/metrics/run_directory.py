"""The directory in which the processes of one server leave their snapshots for the one that is asked for metrics.

It is `vllm-async-spec.UID/run-*` below the temporary directory, and both are private.
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
"""Names it to the processes that this one starts. vLLM warns about each VLLM_ variable that is not its own."""

_PREFIX = "run-"
_FILES = re.compile(r"[0-9]+-[0-9a-f]{8}\.(json|tmp)|[0-9a-f]{16}\.said")


def snapshot_path(directory: Path) -> Path:
    """A file for the snapshot of this process; before it is whole its suffix is `.tmp`."""
    # Number and token: the file of a process that has ended stays, and its number may be given to another.
    return directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"


def said_path(directory: Path, sentence: str) -> Path:
    """The file that is there once a process of the server has logged `sentence`."""
    return directory / f"{hashlib.sha256(sentence.encode()).hexdigest()[:16]}.said"


def run_directory() -> Path:
    """The directory of this server: what the parent process names, or else a new one, which ends with this process.

    A process that multiprocessing did not start is a server of its own, whatever environment it was started in.

    Raises:
        OSError: a new one can't be made.
    """
    inherited = os.environ.pop(VARIABLE, None)
    directory = None if inherited is None or is_main_process() else _joined(inherited)
    if directory is None:
        directory = _made()
        atexit.register(_remove, directory, os.getpid())
    os.environ[VARIABLE] = str(directory)
    return directory


def _joined(inherited: str) -> Path | None:
    """The directory of the server that this process belongs to, which stays as long as any process of the server."""
    try:
        private_directory.hold(Path(inherited))
    except OSError as error:
        logger.warning(
            "vllm-async-spec: /metrics lacks the counts of process %d, because %s is %r: %s; unset it",
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
            "vllm-async-spec: %s; move it away. Until then the counts of a server's processes are in a directory that "
            "stays if the server is killed, now %s",
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
    if os.getpid() == owner:  # a forked child that ends by itself runs this too
        with contextlib.suppress(OSError):
            private_directory.remove(directory, _FILES, abandoned=False)
