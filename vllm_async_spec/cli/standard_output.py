"""Standard output that can't take what a command prints: characters that it lacks, or anything at all."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

import typer


def escape_unencodable() -> None:
    """Print characters that the encoding of stdout or stderr lacks as their codes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def output_or_reason() -> Iterator[None]:
    """End the process with one sentence and exit code 1 where stdout can't be written."""
    try:
        yield
    except OSError as error:
        if _stdout_takes_text():  # then the error is of something else
            raise
        with contextlib.suppress(OSError):
            why = error.strerror or error
            typer.echo(f"vllm-async-spec: standard output can't be written ({why}); send it elsewhere", err=True)
        # The text that Python still holds, and would write at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _stdout_takes_text() -> bool:
    """Whether an empty line can be written; what has failed may no longer be in the buffer."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True
