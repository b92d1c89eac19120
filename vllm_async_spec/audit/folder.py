"""The folder of an audit's recordings: its front end makes it, and the engine's processes write into it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_PREFIX = "vllm-async-spec-audit-"


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """A new one, which only this user can enter; with what is in it, it goes when the `with` block ends."""
    return tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)


def check_folder(folder: str) -> Path:
    """The folder, if `make_folder` may have made it.

    Whoever reaches an engine's `collective_rpc` can name any path, and what is written there replaces what is there.

    Raises:
        ValueError: it is another; the message says why.
    """
    path, temporary = Path(folder), Path(tempfile.gettempdir())
    if path.parent != temporary or not path.name.startswith(_PREFIX):
        raise _refusal(folder, f"it is not a {_PREFIX}* in {temporary}")
    try:
        found = path.lstat()
    except OSError as error:
        raise _refusal(folder, str(error.strerror)) from None
    if not stat.S_ISDIR(found.st_mode):
        raise _refusal(folder, "it is no directory")
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise _refusal(folder, "it is not this user's alone")
    return path


def _refusal(folder: str, why: str) -> ValueError:
    return ValueError(f"an audit can't be recorded in {folder!r}: {why}; leave making the folder to vllm-async-spec")
