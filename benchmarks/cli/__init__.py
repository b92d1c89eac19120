"""The command line: `python -m benchmarks COMMAND`; `--help` lists the commands."""

import typer

from benchmarks.cli import measurements, results, serving, tokens
from benchmarks.cli.common import Commands

app = typer.Typer(
    cls=Commands,
    help="All measurements of this project; docs/benchmarks.md explains how to read them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for family in (results, serving, measurements, tokens):
    app.add_typer(family.app)  # without a name of its own: its commands are the app's
