"""Shares each process's counters with the server's other processes, through one file per process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_async_spec.sync_policy import on_first_count, sync_report
from vllm_async_spec.vllm_plugin.ledger import Outcome, State
from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.metrics.run_directory import run_directory, said_path, snapshot_path
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine, Snapshot

INTERVAL = 1.0
"""Seconds between two checks of the counters."""


class SnapshotFile:
    """The file with this process's counters, one for each process in the server's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = snapshot_path(directory)
        self._lock = threading.Lock()
        self._text = ""
        self._warned = False

    def replace(self, text: str) -> None:
        """Write `text` if it has changed. After a failure the next call tries again; only the first failure warns."""
        with self._lock:
            if text == self._text:
                return
            unfinished = self._path.with_suffix(".tmp")
            try:
                unfinished.write_text(text, encoding="utf-8")
                unfinished.replace(self._path)
                self._text = text
            except FileNotFoundError:
                pass  # the server has ended and removed its directory
            except OSError as error:
                if not self._warned:
                    logger.warning("vllm-async-spec: /metrics lacks new counts of process %d: %s", os.getpid(), error)
                self._warned = True

    def warn_if_gone(self) -> None:
        """Warn once if the directory is gone. For a process that answers scrapes, so that its server has not ended."""
        if not self._warned and not self.directory.is_dir():
            self._warned = True
            logger.warning(
                "vllm-async-spec: /metrics lacks the counts of other processes, because %s was removed; restart the "
                "server to have them again",
                self.directory,
            )

    def claim(self, sentence: str) -> bool:
        """Whether no process of the server has claimed this sentence before."""
        try:
            said_path(self.directory, sentence).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # then every process logs the sentence
            return True
        return True

    def others(self) -> list[str]:
        """The texts of the other processes, including processes that have ended."""
        return [path.read_text(encoding="utf-8") for path in self.directory.glob("*.json") if path != self._path]


class Publisher:
    """Publishes this process's counters to the server's other processes, and reads theirs.

    Before `start`, and if no directory could be made, only the counters of this process are known. A process that
    counts nothing starts no thread.
    """

    def __init__(self) -> None:
        self._outcomes: Mapping[str, Outcome] = {}
        self._file: SnapshotFile | None = None
        self._engine: Engine | None = None
        self._foreseen: dict[str, tuple[State, str]] = {}
        self.failure: OSError | None = None
        """Why only the counters of this process are known."""

    def start(self, outcomes: Mapping[str, Outcome]) -> None:
        """Publish the counters of this process and of those that it forks; `outcomes` is the ledger's live mapping."""
        self._outcomes = outcomes
        try:
            directory = run_directory()
        except OSError as error:
            self.failure = error
        else:
            self._begin(directory)
            os.register_at_fork(after_in_child=lambda: self._begin(directory))

    def report(self, *, engine: Engine | None = None, foreseen: Mapping[str, tuple[State, str]] | None = None) -> None:
        """Publish what only this process knows: its engine, and the states that waiting patches will have."""
        self._engine = engine or self._engine
        self._foreseen |= foreseen or {}
        self.publish()

    def publish(self) -> None:
        """Write this process's counters now."""
        if self._file is not None:
            self._file.replace(self._own().to_json())

    def is_first(self, sentence: str) -> bool:
        """Whether this process is the server's first to log `sentence`; always True without a shared directory."""
        return self._file is None or self._file.claim(sentence)

    def snapshot(self) -> Snapshot:
        """The sum over all processes that this server has or had on this machine."""
        if self._file is not None:
            self._file.warn_if_gone()
        self.publish()
        others = self._file.others() if self._file is not None else []
        return Snapshot.together([self._own(), *map(Snapshot.from_json, others)])

    def _own(self) -> Snapshot:
        snapshot = Snapshot.of(sync_report(), self._outcomes)
        snapshot.foreseen = self._foreseen
        snapshot.engines = [self._engine] if self._engine else []
        return snapshot

    def _begin(self, directory: Path) -> None:
        self._file = SnapshotFile(directory)
        on_first_count(self._start_thread)

    def _start_thread(self) -> None:
        assert self._file is not None
        thread = threading.Thread(target=self._run, args=(self._file,), name="async-spec-metrics", daemon=True)
        with contextlib.suppress(RuntimeError):  # a terminating interpreter starts no threads
            thread.start()

    def _run(self, file: SnapshotFile) -> None:
        while file.directory.is_dir():
            file.replace(self._own().to_json())
            time.sleep(INTERVAL)
