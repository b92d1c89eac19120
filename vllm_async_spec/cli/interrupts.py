"""Signals that end a command: the command ends its own processes, and says so in one sentence without a traceback."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup


class Interrupted(KeyboardInterrupt):
    """A signal other than SIGINT, which ends the command as Ctrl-C does."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a command that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal_of(interrupt)


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """The signal behind an interrupt."""
    return interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT


class InterruptibleGroup(TyperGroup):
    """Commands that a signal ends with one sentence."""

    program: ClassVar[str] = "vllm-async-spec"

    def invoke(self, ctx: Any) -> Any:
        """Run the command, as the base class does."""
        try:
            with _signals_interrupt():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            name = signal_of(interrupt).name
            typer.echo(f"{self.program}: interrupted by {name}; the processes of this command have ended", err=True)
            raise typer.Exit(exit_code(interrupt)) from None


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a closed terminal, interrupt as Ctrl-C does meanwhile, unless the caller ignores them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, and gets the signals
        return
    chosen = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in chosen:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in chosen:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number))
