"""The folder of an audit's recordings: its front end makes it, and the engine's processes write into it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_PREFIX = "vllm-async-spec-audit-"


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder that only this user can enter; the end of the `with` block deletes it."""
    return tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)


def check_folder(folder: str) -> Path:
    """The folder, if `make_folder` may have made it.

    A caller of an engine's `collective_rpc` can name any path, and a recording overwrites files there.

    Raises:
        ValueError: `make_folder` can't have made the folder; the message says why.
    """
    path, temporary = Path(folder), Path(tempfile.gettempdir())
    if path.parent != temporary or not path.name.startswith(_PREFIX):
        raise _refusal(folder, f"it does not match {temporary}/{_PREFIX}*")
    try:
        found = path.lstat()
    except OSError as error:
        raise _refusal(folder, str(error.strerror)) from None
    if not stat.S_ISDIR(found.st_mode):
        raise _refusal(folder, "it is not a directory")
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise _refusal(folder, "it does not belong to this user with mode 0700")
    return path


def _refusal(folder: str, why: str) -> ValueError:
    return ValueError(f"an audit can't be recorded in {folder!r}: {why}; let vllm-async-spec create the folder")
