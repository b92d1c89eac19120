"""Each process of a server tells the others what it has counted, by a file that it replaces when that changes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_async_spec.sync_policy import on_first_count, sync_report
from vllm_async_spec.vllm_plugin.ledger import Outcome
from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.metrics.run_directory import run_directory, said_path, snapshot_path
from vllm_async_spec.vllm_plugin.metrics.snapshot import Snapshot

INTERVAL = 1.0
"""Seconds between two looks at the counters."""


class SnapshotFile:
    """What this process tells the others.

    Args:
        directory: the server's, where each of its processes has such a file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = snapshot_path(directory)
        self._lock = threading.Lock()
        self._text = ""
        self._warned = False

    def replace(self, text: str) -> None:
        """Write what has changed. If that fails, the next call tries again; the first failure is warned about."""
        with self._lock:
            if text == self._text:
                return
            unfinished = self._path.with_suffix(".tmp")
            try:
                unfinished.write_text(text, encoding="utf-8")
                unfinished.replace(self._path)
                self._text = text
            except FileNotFoundError:
                pass  # the server has ended, and its directory with it
            except OSError as error:
                if not self._warned:
                    logger.warning("vllm-async-spec: /metrics lacks new counts of process %d: %s", os.getpid(), error)
                self._warned = True

    def claim(self, sentence: str) -> bool:
        """Whether no process of the server has claimed this sentence before."""
        try:
            said_path(self.directory, sentence).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # then each process says it
            return True
        return True

    def others(self) -> list[str]:
        """What the other processes have written, those that have ended too."""
        return [path.read_text(encoding="utf-8") for path in self.directory.glob("*.json") if path != self._path]


class Publisher:
    """The counters of this process for the others of its server, and theirs for this one.

    Before it is started, and where no directory could be made, it knows of this process only. There is no thread in a
    process in which nothing is counted.
    """

    def __init__(self) -> None:
        self._outcomes: Mapping[str, Outcome] = {}
        self._file: SnapshotFile | None = None
        self.failure: OSError | None = None
        """Why it knows of this process only."""

    def start(self, outcomes: Mapping[str, Outcome]) -> None:
        """Publish what is counted in this process, and in those that it forks.

        Args:
            outcomes: of the ledger, as they come to be.
        """
        self._outcomes = outcomes
        try:
            directory = run_directory()
        except OSError as error:
            self.failure = error
        else:
            self._begin(directory)
            os.register_at_fork(after_in_child=lambda: self._begin(directory))

    def publish(self) -> None:
        """Tell the others now."""
        if self._file is not None:
            self._file.replace(self._own().to_json())

    def is_first(self, sentence: str) -> bool:
        """Whether this process is the first of the server to say `sentence`, where they can tell each other."""
        return self._file is None or self._file.claim(sentence)

    def snapshot(self) -> Snapshot:
        """The counters of all processes that this server has, or had, on this machine."""
        self.publish()
        others = self._file.others() if self._file is not None else []
        return Snapshot.together([self._own(), *map(Snapshot.from_json, others)])

    def _own(self) -> Snapshot:
        return Snapshot.of(sync_report(), self._outcomes)

    def _begin(self, directory: Path) -> None:
        self._file = SnapshotFile(directory)
        on_first_count(self._start_thread)

    def _start_thread(self) -> None:
        assert self._file is not None
        thread = threading.Thread(target=self._run, args=(self._file,), name="async-spec-metrics", daemon=True)
        with contextlib.suppress(RuntimeError):  # an interpreter that is about to end starts none
            thread.start()

    def _run(self, file: SnapshotFile) -> None:
        while file.directory.is_dir():
            file.replace(self._own().to_json())
            time.sleep(INTERVAL)
