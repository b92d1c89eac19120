"""Where output goes: checked before work starts, and kept elsewhere if it can't be written at the end."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer


class OutputError(ValueError):
    """Output can't go where an option says; the message says why and what to do."""


def checked_option(
    check: Callable[[str, Path], None], fail: Callable[[str], NoReturn]
) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    """Makes the callback of an option that names a file or folder for output.

    `check` is `check_file` or `check_folder`; `fail` ends the command with a sentence.
    """

    def callback(param: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None:
            try:
                check(param.opts[0], path)
            except OutputError as error:
                fail(str(error))
        return path

    return callback


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises:
        OutputError: the path is a directory, its directory does not exist, or either can't be written.
    """
    if os.path.isdir(path):
        raise OutputError(f"{option} is {str(path)!r}, which is a directory; name a file")
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise OutputError(
            f"{option} is {str(path)!r}, whose directory does not exist; create the directory, or name another"
        )
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            tempfile.TemporaryFile(dir=folder).close()
        else:
            if stat.S_ISREG(mode):  # else a device or a pipe, which opening could block
                os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        raise OutputError(
            f"{option} is {str(path)!r}, which can't be written ({error.strerror}); name a file that can"
        ) from None


def check_folder(option: str, path: Path) -> None:
    """Check that files can be written into a folder, which need not exist yet.

    Raises:
        OutputError: the path is no folder, or can't be written.
    """
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))
    if not os.path.isdir(existing):
        raise OutputError(f"{option} is {str(path)!r}, but {existing} is not a directory; name another")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OutputError(
            f"{option} is {str(path)!r}, which can't be written ({error.strerror}); name a directory that can"
        ) from None


_NAMED = "backslashreplace"
"""For an output with a file's name in it, which may be no UTF-8."""


def write_output(option: str, path: Path, text: str) -> str | None:
    """Write a file; if that fails, keep the text in a private file of the temporary directory.

    Returns:
        None, or a sentence that says why the file was not written, and where the text is.
    """
    created = False
    try:
        with path.open("w" if os.path.lexists(path) else "x", encoding="utf-8", errors=_NAMED) as file:
            created = file.mode == "x"
            file.write(text)
    except OSError as error:
        if created:  # a part of the output would pass for the whole
            with contextlib.suppress(OSError):
                path.unlink()
        return f"{option} is {str(path)!r}, which can't be written ({error.strerror}); {keep_elsewhere(path, text)}"
    return None


def keep_elsewhere(path: Path, text: str) -> str:
    """Keep the text of a file that can't be written in the temporary directory; returns a clause that says where."""
    try:
        end = os.fsencode(path.name)[-100:].decode(errors="ignore")  # with more, the name could be too long
        descriptor, name = tempfile.mkstemp(prefix="vllm-async-spec-", suffix=f"-{end}")
        with open(descriptor, "w", encoding="utf-8", errors=_NAMED) as file:
            file.write(text)
    except OSError as error:
        return (
            f"the temporary directory can't keep this output either ({error.strerror or error}), so this output is lost"
        )
    return f"this output is kept in {name}"
