"""Servers' run directories in a scratch world: made, ended and killed in this process, and all that is there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_async_spec.vllm_plugin.metrics import private_directory, run_directory

SNAPSHOT = "12-0123abcd.json"
Entry = tuple[Any, ...]
Spoil = Callable[[Path, Path], object]
"""What it does to a directory, given a home too."""

_SOMEBODY = 65534


def listing(root: Path) -> dict[str, Entry]:
    """All below a directory: mode, owner, inode, and what a file holds or a link names. No link is followed."""
    found: dict[str, Entry] = {}
    for folder, names, files in os.walk(root):
        for path in (Path(folder, name) for name in (*names, *files)):
            is_ = path.lstat()
            held = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = (oct(is_.st_mode), is_.st_uid, is_.st_ino, held)
    return found


class World:
    """A home and a temporary directory with much in them that servers have no business with."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.home, self.temporary = root, root / "home", root / "tmp"
        self.parent = self.temporary / f"vllm-async-spec.{os.geteuid()}"
        self.warnings: list[str] = []
        for path in ("home/.bashrc", "home/src/vllm-async-spec-main/README.md", f"home/{SNAPSHOT}"):
            written(root / path)
        for path in ("vllm-async-spec-main/.git/HEAD", "vllm-async-spec-audit-xyz/done", f"run-abcdefgh/{SNAPSHOT}"):
            written(self.temporary / path)
        written(self.temporary / "vllm-async-spec-notes.txt")
        (self.temporary / "vllm-async-spec-empty").mkdir()
        (self.temporary / "vllm-async-spec-home").symlink_to(self.home)
        (self.temporary / "vllm-async-spec-nowhere").symlink_to(root / "nowhere")
        for path in self.temporary.iterdir():
            os.utime(path, (0, 0), follow_symlinks=False)
        patch.setattr(tempfile, "tempdir", str(self.temporary))
        patch.setenv(run_directory.VARIABLE, "")  # so that what servers make of it is undone
        patch.delenv(run_directory.VARIABLE)
        patch.setattr(run_directory.logger, "warning", lambda text, *values: self.warnings.append(text % values))

    def listing(self) -> dict[str, Entry]:
        return listing(self.root)

    def server(self) -> Server:
        return Server()

    def abandoned(self, count: int = 1) -> list[Path]:
        """The directories of servers that were killed, each with a snapshot in it."""
        servers = [self.server() for _ in range(count)]
        for server in servers:
            written(server.directory / SNAPSHOT)
            server.kill()
        return [server.directory for server in servers]


class Server:
    """What a server's process does about its directory: ended, it removes it; killed, it only lets go of it."""

    def __init__(self) -> None:
        self._at_exit: list[Callable[[], None]] = []
        before = _descriptors()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                run_directory.atexit, "register", lambda run, *args: self._at_exit.append(lambda: run(*args))
            )
            self.directory = run_directory.run_directory()
        self._held = _descriptors() - before

    def end(self) -> None:
        for run in self._at_exit:
            run()
        self.kill()

    def kill(self) -> None:
        while self._held:
            os.close(self._held.pop())


def _descriptors() -> set[int]:
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in found if os.path.exists(f"/proc/self/fd/{number}")}


def written(path: Path, text: str = "theirs") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def marker_of(directory: Path) -> Path:
    return directory / private_directory.MARKER


def is_directory(entry: Entry) -> bool:
    return stat.S_ISDIR(int(entry[0], 8))


def replaced(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def moved_behind_a_link(directory: Path, home: Path) -> None:
    directory.rename(home / directory.name)
    directory.symlink_to(home / directory.name)


def other_marker(directory: Path, home: Path) -> None:
    marker_of(directory).rename(home / "marker")
    marker_of(directory).symlink_to(home / "marker")


FOREIGN: dict[str, Spoil] = {
    "file": lambda directory, home: written(directory / "notes.txt"),
    "file named nearly as ours": lambda directory, home: written(directory / f"{SNAPSHOT}.bak"),
    "file with a name that is no text": lambda directory, home: written(directory / os.fsdecode(b"\xff.json")),
    "directory": lambda directory, home: written(directory / "results" / "1.json"),
    "directory named as our file": lambda directory, home: written(directory / "9-0123abcd.json" / "1.json"),
    "link to a file": lambda directory, home: (directory / "9-0123abcd.json").symlink_to(home / ".bashrc"),
    "link to a directory": lambda directory, home: (directory / "9-0123abcd.tmp").symlink_to(home),
    "link to nothing": lambda directory, home: (directory / "9-0123abcd.json").symlink_to(home / "nothing"),
    "hard link": lambda directory, home: (directory / "9-0123abcd.json").hardlink_to(home / ".bashrc"),
    "pipe": lambda directory, home: os.mkfifo(directory / "9-0123abcd.json"),
}
"""Ways in which something foreign gets into a marked directory."""

UNMARKED: dict[str, Spoil] = {
    "no marker": lambda directory, home: marker_of(directory).unlink(),
    "an empty marker": lambda directory, home: marker_of(directory).write_text(""),
    "a foreign marker": lambda directory, home: marker_of(directory).write_text("mine\n"),
    "a longer marker": lambda directory, home: marker_of(directory).open("a").write("and mine\n"),
    "a marker elsewhere": other_marker,
    "a marker with two names": lambda directory, home: (home / "marker").hardlink_to(marker_of(directory)),
    "a pipe as its marker": lambda directory, home: replaced(
        marker_of(directory), lambda: os.mkfifo(marker_of(directory))
    ),
    "a directory as its marker": lambda directory, home: replaced(marker_of(directory), marker_of(directory).mkdir),
    "others may write": lambda directory, home: directory.chmod(0o702),
    "a group may write": lambda directory, home: directory.chmod(0o720),
    "a link to it": moved_behind_a_link,
}
"""Ways in which a directory of ours stops being one, or was none."""

if os.geteuid() == 0:  # who alone can give a file to another user
    FOREIGN["file of another user"] = lambda directory, home: os.chown(written(directory / SNAPSHOT), _SOMEBODY, -1)
    UNMARKED["another user's"] = lambda directory, home: os.chown(directory, _SOMEBODY, -1)
    UNMARKED["another user's marker"] = lambda directory, home: os.chown(marker_of(directory), _SOMEBODY, -1)
