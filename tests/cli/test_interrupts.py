"""A signal ends a command with one sentence, its exit code and no traceback, and ends what the command started."""

import signal
import sys
from pathlib import Path

import pytest
from families import BARE, CHILD, PARENT, begin, family, left

COMMAND = f"""{BARE}
from vllm_async_spec.cli.interrupts import InterruptibleGroup
import typer
app = typer.Typer(cls=InterruptibleGroup)

@app.command()
def work(child: str, log: str):
    sys.argv = ["", child, log]
    exec(open("parent.py").read())

@app.command()
def rest():
    pass

app()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_command_and_its_children(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parent.py").write_text(PARENT)
    command = begin("-c", COMMAND, "work", CHILD, "log")
    children = family(command)
    command.send_signal(number)
    _, said = command.communicate(timeout=60)
    assert said == f"vllm-async-spec: interrupted by {number.name}; the processes of this command have ended\n"
    assert command.returncode == 128 + number
    assert left(children) == []


def test_an_ignored_signal_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parent.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('goes on')")
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    command = begin("-c", f"{ignore}\n{COMMAND}", "work", "", "")
    assert command.communicate(timeout=60) == ("goes on\n", "")
    assert command.returncode == 0


@pytest.mark.parametrize("module", ["vllm_async_spec.cli", "benchmarks.cli"])
def test_both_programs_end_so(module: str):
    from importlib import import_module

    from vllm_async_spec.cli.interrupts import InterruptibleGroup

    assert issubclass(import_module(module).app.info.cls, InterruptibleGroup)
    assert sys.modules[module].app.info.cls.program in ("vllm-async-spec", "benchmarks")
