"""The error in an engine's log that ended the engine.

vLLM's front end ends with "Engine core initialization failed. See root cause above." The cause is in the lines of
another process, each with a prefix that depends on the release:

- 0.12 to 0.26: `(EngineCore pid=7) ERROR 11-21 04:12:33 [core.py:946] ValueError: ...`, and the prefix `(EngineCore
  pid=7)` before what the process prints without vLLM's logger.
- 0.32: the same before what vLLM's logger prints, and nothing before the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(?:\([^()]* pid=\d+[^()]*\)\s?)*(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\.\d+ )?\[[^\]]*\] ?)?")
_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Failure)\b(?:: .*)?$|^Exception: "
)
"""The last line of a traceback."""
_TELLING = re.compile(r"\b\w*(Error|Exception|Killed|Segmentation fault)\b|died unexpectedly")
_ELSEWHERE = re.compile(r"root cause|EngineDeadError|EngineCore encountered an issue")
"""An error that stands for another process's."""
_WITHOUT_CAUSE = re.compile(r"^(?:KeyboardInterrupt|SystemExit|\w*BrokenPipeError|EOFError)\b")
"""How processes end because another ended."""
_FATAL = re.compile(r"Segmentation fault|Fatal Python error|CUDA error")
_ENDED = re.compile(r"[Ee]ngine core (?:proc \S+ )?(?:exited|died) unexpectedly")
_KILLED = re.compile(r"Failed (?:core|frontend) proc\(s\): \{[^}]*: -9\b")
_LONGEST = 600
"""Characters of an error that a message keeps."""


def names_no_cause(error: str) -> bool:
    """Whether this message only says that the cause is elsewhere, in the lines of another process."""
    return _ELSEWHERE.search(error) is not None


def last_error(log: Path) -> str:
    """The error that ended an engine, from its log: one line.

    That is the last line of the last traceback before any error that only refers to another. Without a traceback, the
    last line that names an error, or else the last line.
    """
    if not log.is_file():  # but a pipe or a device: what went there can't be read again, and reading could block
        return "the log says why, and is no file to read it from"
    lines = [_plain(line) for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "the log is empty"
    first = next((index for index, line in enumerate(lines) if names_no_cause(line)), len(lines))
    causes = [*_causes(lines[:first])] or [*_causes(lines[first:])]
    if causes:
        return causes[-1][:_LONGEST]
    if any(_KILLED.search(line) for line in lines):
        return "the engine core was killed by SIGKILL, which the kernel sends when memory runs out"
    if any(_ENDED.search(line) for line in lines):
        fatal = (line.strip() for line in lines if _FATAL.search(line))
        return next(fatal, "the engine core ended and left no traceback, as after SIGKILL")[:_LONGEST]
    telling = (line.strip() for line in reversed(lines) if _TELLING.search(line) and not names_no_cause(line))
    return next(telling, lines[-1].strip())[:_LONGEST]


def _plain(line: str) -> str:
    """The line without colours and without vLLM's prefixes."""
    return _PREFIX.sub("", _COLOUR.sub("", line), count=1)


def _causes(lines: Sequence[str]) -> Iterator[str]:
    """The last lines of tracebacks, with what pydantic says below; without those that Python ignored."""
    ignored = False
    for index, line in enumerate(lines):
        ignored = ignored or line.startswith("Exception ignored in")
        if not _ERROR.match(line):
            continue
        was_ignored, ignored = ignored, False
        if was_ignored or names_no_cause(line) or _WITHOUT_CAUSE.match(line):
            continue
        if "validation error" in line:
            line = " ".join([line, *(each.strip() for each in lines[index + 1 : index + 3] if each.startswith("  "))])
        yield " ".join(line.split())
