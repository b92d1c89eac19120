"""Imported by every Python process with this folder on PYTHONPATH: SIGUSR1 writes all its stacks into a file.

`STACK_DUMPS` names the folder for the files. Each process has its own, also where it is forked.
"""

import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

_files: list[TextIO] = []  # keeps the descriptor open that the signal's handler writes to


def _register() -> None:
    folder = os.environ.get("STACK_DUMPS")
    if folder and Path(folder).is_dir():
        _files.append((Path(folder) / str(os.getpid())).open("w", encoding="utf-8"))
        faulthandler.register(signal.SIGUSR1, file=_files[-1], all_threads=True)


_register()
os.register_at_fork(after_in_child=_register)
