"""What the commands share: how a command fails, and options that mean the same everywhere."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from vllm_async_spec.cli.outputs import check_file, checked_option, write_output

AsJson = Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")]

LEFT_OUT = (
    "vLLM does not load the plugin, because VLLM_PLUGINS is set and does not name async_spec; add async_spec, or unset "
    "VLLM_PLUGINS"
)
"""Said where `settings.left_out` is true."""


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one sentence on stderr, and no traceback."""
    typer.echo(f"vllm-async-spec: {message}", err=True)
    raise typer.Exit(code)


def refuse(mistake: str) -> NoReturn:
    """End the command for a mistake of its command line, as typer does for an unknown option: with exit code 2."""
    fail(mistake, 2)


output_file = checked_option(check_file, refuse)
"""Callback of an option that names a file for output: ends the command if the file can't be written."""


def distinct_files(outputs: Mapping[str, Path | None]) -> None:
    """End the command if two options name one file; several may name one device or pipe, such as `/dev/null`."""
    options: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is not None and (os.path.isfile(path) or not os.path.exists(path)):
            other = options.setdefault(path.resolve(), option)
            if other != option:
                refuse(f"{other} and {option} both name {str(path)!r}; name two files")


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option was given; anything else ends the command."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        refuse(f'{option} is {text!r}, which is not JSON ({error}); give an object such as \'{{"method": "eagle"}}\'')
    if not isinstance(value, dict):
        refuse(f'{option} is {text!r}; it must be a JSON object such as \'{{"method": "eagle"}}\'')
    return value


@contextlib.contextmanager
def progress_on_stderr(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that the command is at work; a terminal shows each stage that the yielded function is given.

    Where there is no terminal, the one line `what` is shown once the work begins.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as shown:
            yield lambda stage: shown.update(f"{stage} ...")
        return
    said = False

    def say(stage: str) -> None:
        nonlocal said
        if not said:
            typer.echo(what, err=True)
        said = True

    yield say


def write_outputs(texts: Mapping[str, tuple[Path, str]]) -> int:
    """Write files, by option: path and text. A file that can't be written is kept elsewhere, and stderr says where.

    Returns:
        How many could not be written.
    """
    failed = [sentence for option, (path, text) in texts.items() if (sentence := write_output(option, path, text))]
    for sentence in failed:
        typer.echo(f"vllm-async-spec: {sentence}", err=True)
    return len(failed)
