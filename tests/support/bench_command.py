"""`python -m benchmarks` in this process, for tests of its commands."""

from typer.testing import CliRunner, Result

from benchmarks.cli import app


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))
