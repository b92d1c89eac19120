"""Keep the results of a run while it lasts, so that a run that is killed loses at most a second's work."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vllm_async_spec.compat.report import Report

_SECONDS = 1.0
"""Least time between two writes: the JSON of all builders takes tens of milliseconds to make."""


class KeptResults:
    """Writes the results so far to a file, at most once a second, each time as a whole.

    Without a path the file is in a new private directory, which `discard` removes; `say` is then called once with a
    sentence that names the file. Results go there too if `path` is a device or a pipe, or can't be written. If that
    can't be written either, `say` is told so once, and the run goes on without.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        if path is not None and path.exists() and not path.is_file():
            path = None  # a rename would replace a device by a file
        self._named, self._path, self._say = path is not None, path, say
        self._written = time.monotonic()
        self._gave_up = False
        self._so_far: Callable[[], Report] | None = None

    def __call__(self, so_far: Callable[[], Report]) -> None:
        """Write the report that `so_far` makes, if the last write is long enough ago."""
        self._so_far = so_far
        if not self._gave_up and time.monotonic() - self._written >= _SECONDS:
            self._write(so_far())

    def stop(self) -> tuple[Report, Path | None] | None:
        """Write what was found so far; the report and its file, if it can be kept; None if no batch was built."""
        if self._so_far is None:
            return None
        report = self._so_far()
        return report, None if self._gave_up else self._write(report)

    def discard(self) -> None:
        """Remove the file and its directory if both are this object's own; the run is at its end."""
        if not self._named and self._path is not None:
            with contextlib.suppress(OSError):  # what is left there changes no result
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()

    def _write(self, report: Report) -> Path | None:
        try:
            return self._write_whole(report)
        except OSError as error:
            if self._named:
                self._named, self._path = False, None
                return self._write(report)
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        self.discard()
        self._gave_up, self._path = True, None
        self._say(
            f"The results so far are not kept, because the temporary directory can't be written ({error}); "
            "free space there, or set TMPDIR to another."
        )

    def _write_whole(self, report: Report) -> Path:
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="vllm-async-spec-")) / "compat.json"
            self._say(f"The results so far are kept in {self._path}; --json FILE keeps them in FILE.")
        # In a directory, which is removed with what is in it if a full disk holds only a part.
        with tempfile.TemporaryDirectory(prefix=f".{self._path.name}.", dir=self._path.parent) as scratch:
            partial = Path(scratch) / self._path.name
            partial.write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
            partial.replace(self._path)
        self._written = time.monotonic()
        return self._path
