"""The command line: `vllm-async-spec demo | status | audit | compat | patches`."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_async_spec._version import __version__
from vllm_async_spec.cli.audit import audit
from vllm_async_spec.cli.compat import compat
from vllm_async_spec.cli.demo import demo
from vllm_async_spec.cli.interrupts import InterruptibleGroup
from vllm_async_spec.cli.patches import patches_app
from vllm_async_spec.cli.standard_output import escape_unencodable, output_or_reason
from vllm_async_spec.cli.status import status

app = typer.Typer(
    cls=InterruptibleGroup,
    help="Speculative decoding in vLLM with no host-device synchronisation on the critical path.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
_WITH_SERVE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(context_settings=_WITH_SERVE_ARGUMENTS)(status)
app.command(context_settings=_WITH_SERVE_ARGUMENTS)(audit)
app.command()(compat)
app.add_typer(patches_app, name="patches")


def main() -> None:
    """Run the command line."""
    escape_unencodable()
    with output_or_reason():
        app()


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
