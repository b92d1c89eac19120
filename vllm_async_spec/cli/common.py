"""What the commands share: how a command fails, and options that mean the same everywhere."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")]


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one sentence on stderr, and no traceback."""
    typer.echo(f"vllm-async-spec: {message}", err=True)
    raise typer.Exit(code)


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option was given; anything else ends the command."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        fail(f'{option} is {text!r}, which is not JSON ({error}); give an object such as \'{{"method": "eagle"}}\'')
    if not isinstance(value, dict):
        fail(f'{option} is {text!r}; it must be a JSON object such as \'{{"method": "eagle"}}\'')
    return value
