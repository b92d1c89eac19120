"""Shared by the commands: options, one-sentence errors, and output of results."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.machine import MachineError, installed_vllm
from vllm_async_spec.cli.interrupts import InterruptibleGroup, exit_code, signal_of
from vllm_async_spec.cli.outputs import check_file, check_folder, checked_option, write_output

Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RELEASE=FILE", help="Environment of a vLLM release: a shell file to source, or a Python executable."
    ),
]

Name = Annotated[str, typer.Option(help="Name of the result file; the plan's name if unset.")]
OneByOne = Annotated[
    bool, typer.Option("--one-by-one", help="End each arm's process before the next starts: for a small GPU.")
]
Budget = Annotated[
    float,
    typer.Option("--budget-s", min=0, help="Begin nothing that would end after this many seconds; 0: no limit."),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start a new result file; the first measurement replaces the existing one.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Run again what failed.")]

CACHE = Path(".cache/benchmarks")
_OF_MACHINE = ("--env", "--out", "--cache", "--budget-s")
_PAGE = 150
"""Width of a table that is written to a file, in characters."""

console = Console() if sys.stdout.isatty() else Console(width=_PAGE)


class Commands(InterruptibleGroup):
    """The commands, which a signal ends with one sentence."""

    program = "benchmarks"


def fail(message: str, code: int = 1) -> NoReturn:
    """End with a sentence on stderr, and an exit code."""
    typer.echo(f"benchmarks: {message}", err=True)
    raise typer.Exit(code)


def fail_interrupted(interrupt: KeyboardInterrupt, what: str) -> NoReturn:
    """End a command that continues where it stopped; `what` it keeps, such as turns."""
    fail(
        f"interrupted by {signal_of(interrupt).name}; finished {what} are kept, and the same command runs the rest",
        exit_code(interrupt),
    )


output_file = checked_option(check_file, fail)
"""Callback of an option that names a file for output: ends the command if the file can't be written."""
output_folder = checked_option(check_folder, fail)
"""The same for a folder, if no file can be written there."""
Out = Annotated[Path, typer.Option(callback=output_folder, help="Folder of the results.")]
Cache = Annotated[Path, typer.Option(callback=output_folder, help="Folder for model directories and logs.")]


@contextlib.contextmanager
def failing(*errors: type[Exception]) -> Iterator[None]:
    """End with the message of any of `errors`, one sentence for the user: exit code 1, or 2 for a MachineError."""
    try:
        yield
    except MachineError as error:
        fail(str(error), code=2)
    except errors as error:
        fail(str(error))


def command_line() -> str:
    """This command, which results keep, without options that say where on this machine it ran, and for how long."""
    kept, left = [], iter(sys.argv[1:])
    for each in left:
        if each in _OF_MACHINE:
            next(left, None)
        elif each.partition("=")[0] not in _OF_MACHINE:
            kept.append(each)
    return f"python -m benchmarks {shlex.join(kept)}"


def find_environments(given: list[str] | None, needed: str | None = None) -> dict[str, Path]:
    """The environments given, by vLLM release; ends the command if none of them, nor this one, has `needed`."""
    environments = {}
    for each in given or []:
        release, _, file = each.partition("=")
        if not file:
            fail(f"--env is {each!r}; it must be RELEASE=FILE, such as 0.32.0=/opt/vllm-0.32.0/env.sh")
        if not Path(file).is_file():
            fail(f"--env {release} is {file!r}, which is no file; give a shell file to source, or a Python executable")
        environments[release] = Path(file).absolute()
    if needed not in (None, installed_vllm(), *environments):
        fail(f"no environment has vLLM {needed}; give --env {needed}=FILE", code=2)
    return environments


def tell(
    found: Mapping[str, Any], table: Table | None, remarks: Iterable[str] = (), json_file: Path | None = None
) -> None:
    """Print a result, and write it to `json_file`, if given."""
    if table is not None:
        console.print(table)
    for remark in remarks:
        typer.echo(remark)
    write_json(found, json_file)


def write_json(found: Mapping[str, Any], json_file: Path | None) -> None:
    """Write a result to `json_file`, if given; a result that can't be written is kept elsewhere, with exit code 1."""
    if json_file:
        write("--json", json_file, json.dumps(found, indent=2) + "\n")


def write(option: str, path: Path, text: str) -> None:
    """Write a file; text that can't be written is kept elsewhere, and the command ends with a sentence that says so."""
    if sentence := write_output(option, path, text):
        fail(sentence)


def say(line: str) -> None:
    """Print a line as it is, however long."""
    console.print(escape(line), highlight=False, soft_wrap=True)
