"""Servers remove their own directories, and nothing else ever disappears or changes."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command_line import COMMAND
from hypothesis import given
from hypothesis import strategies as st
from run_servers import FOREIGN, SNAPSHOT, UNMARKED, Spoil, World, is_directory, listing, marker_of, written

from vllm_async_spec.vllm_plugin.metrics import private_directory, run_directory


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_server_leaves_its_surroundings_and_one_marked_directory(world: World):
    before = world.listing()
    server = world.server()
    assert server.directory.parent == world.parent
    assert oct(world.parent.stat().st_mode) == oct(server.directory.stat().st_mode) == oct(0o40700)
    written(server.directory / SNAPSHOT)
    server.end()
    after = world.listing()
    parent = str(world.parent.relative_to(world.root))
    assert {path: entry for path, entry in after.items() if not path.startswith(parent)} == before
    assert {path for path in after if path.startswith(parent)} == {parent, f"{parent}/{private_directory.MARKER}"}
    world.server().end()
    assert world.listing() == after
    assert world.warnings == []


@pytest.mark.parametrize("spoil", [*FOREIGN, *UNMARKED])
def test_what_is_foreign_in_the_parent_stays_and_what_was_abandoned_goes(world: World, spoil: str):
    abandoned, spoilt = world.abandoned(2)
    (FOREIGN | UNMARKED)[spoil](spoilt, world.home)
    kept = {path: entry for path, entry in world.listing().items() if abandoned.name not in path}
    for _ in range(2):
        world.server().end()
        assert world.listing() == kept
    assert not abandoned.exists()
    assert world.warnings == []


@pytest.mark.parametrize("spoil", [*FOREIGN, *UNMARKED])
def test_a_server_leaves_its_own_directory_if_it_is_no_longer_its_own(world: World, spoil: str):
    server = world.server()
    written(server.directory / SNAPSHOT)
    (FOREIGN | UNMARKED)[spoil](server.directory, world.home)
    before = world.listing()
    server.end()
    assert world.listing() == before


def test_foreign_entries_in_the_parent_stay(world: World):
    (abandoned,) = world.abandoned()
    written(world.parent / "notes.txt")
    written(world.parent / "run-file")
    written(world.parent / "run-unmarked" / SNAPSHOT)
    (world.parent / "run-empty").mkdir()
    (world.parent / "run-home").symlink_to(world.home)
    (world.parent / "run-nowhere").symlink_to(world.root / "nowhere")
    written(marker_of(world.parent / os.fsdecode(b"run-\xff")))
    shutil.copytree(abandoned, world.parent / "run-copied")
    shutil.copytree(abandoned, world.home / "run-copied")
    abandoned.rename(world.parent / "run-renamed")
    before = world.listing()
    world.server().end()
    assert world.listing() == before


@pytest.mark.parametrize("spoil", UNMARKED)
def test_a_foreign_parent_is_not_used_and_not_changed(world: World, spoil: str):
    world.abandoned()
    UNMARKED[spoil](world.parent, world.home)
    before = world.listing()
    server = world.server()
    written(server.directory / SNAPSHOT)
    assert server.directory.parent == world.temporary
    now = world.listing()
    assert {path: now[path] for path in before} == before
    server.end()
    assert world.listing() == before
    assert len(world.warnings) == 1
    assert str(world.parent) in world.warnings[0]
    assert world.warnings[0].endswith(str(server.directory))
    assert "move that path away" in world.warnings[0]


KINDS: dict[str, Spoil] = {
    "file": lambda path, home: path.open("x").close(),
    "directory": lambda path, home: path.mkdir(),
    "link": lambda path, home: path.symlink_to(home),
    "dangling": lambda path, home: path.symlink_to(home / "nowhere"),
    "hard link": lambda path, home: path.hardlink_to(home / ".bashrc"),
    "full": lambda path, home: shutil.copytree(home / "src", path),
}


@pytest.mark.parametrize("kind", [*KINDS, "pipe"])
def test_what_has_the_parents_name_already_is_left_alone(world: World, kind: str):
    (KINDS | {"pipe": lambda path, home: os.mkfifo(path)})[kind](world.parent, world.home)
    before = world.listing()
    server = world.server()
    assert server.directory.parent == world.temporary
    server.end()
    assert world.listing() == before
    assert len(world.warnings) == 1


@pytest.mark.parametrize("link", [True, False])
def test_a_parent_that_is_replaced_meanwhile(world: World, link: bool):
    server = world.server()
    written(server.directory / SNAPSHOT)
    (world.home / server.directory.name).mkdir()
    world.parent.rename(world.home / "moved")
    if link:
        world.parent.symlink_to(world.home)
    else:
        written(world.parent / server.directory.name / SNAPSHOT)
    before = world.listing()
    server.end()
    assert world.listing() == before


def test_a_parent_that_is_replaced_while_a_directory_is_removed(world: World, monkeypatch: pytest.MonkeyPatch):
    """Here an empty directory of somebody's has the name of the one that is removed."""
    (abandoned,) = world.abandoned()
    (world.home / abandoned.name).mkdir()
    unlink = os.unlink

    def unlink_and_replace(name: str, *, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        if name == private_directory.MARKER:
            world.parent.rename(world.home / "moved")
            world.parent.symlink_to(world.home)

    monkeypatch.setattr(os, "unlink", unlink_and_replace)
    private_directory.remove(abandoned, run_directory._FILES, abandoned=True)
    assert (world.home / abandoned.name).is_dir()
    assert not (world.home / "moved" / abandoned.name).exists()


def test_a_directory_stays_as_long_as_any_process_of_its_server(world: World, monkeypatch: pytest.MonkeyPatch):
    server = world.server()
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "is_main_process", lambda: False)
        child = world.server()
    assert child.directory == server.directory
    server.kill()
    world.server().end()
    assert server.directory.is_dir()
    child.end()
    assert server.directory.is_dir(), "a child that ends removes nothing"
    world.server().end()
    assert not server.directory.exists()


@pytest.mark.parametrize("given", ["home", "tmp/vllm-async-spec-main", "nowhere", ""])
def test_a_child_that_is_given_a_foreign_directory_writes_nothing_there(
    world: World, monkeypatch: pytest.MonkeyPatch, given: str
):
    world.server().end()
    monkeypatch.setattr(run_directory, "is_main_process", lambda: False)
    monkeypatch.setenv(run_directory.VARIABLE, str(world.root / given) if given else "")
    before = world.listing()
    child = world.server()
    assert child.directory.parent == world.parent
    assert os.environ[run_directory.VARIABLE] == str(child.directory)
    child.end()
    assert world.listing() == before
    assert len(world.warnings) == 1
    assert f"{run_directory.VARIABLE} is '{os.path.join(world.root, given) if given else ''}'" in world.warnings[0]


def test_a_directory_is_not_taken_for_abandoned_while_it_is_made(world: World, monkeypatch: pytest.MonkeyPatch):
    mark = private_directory._mark

    def clean_up_around(descriptor: int, name: str) -> None:
        for step in (lambda: None, lambda: mark(descriptor, name)):
            step()
            for path in world.parent.glob("run-*"):
                with contextlib.suppress(OSError):
                    private_directory.remove(path, run_directory._FILES, abandoned=True)

    world.server().end()
    monkeypatch.setattr(private_directory, "_mark", clean_up_around)
    assert world.server().directory.is_dir()
    assert world.warnings == []


def test_a_directory_that_a_process_writes_to_meanwhile_stays_ours(world: World, monkeypatch: pytest.MonkeyPatch):
    server = world.server()
    rmdir = os.rmdir

    def write_first(name: str, *, dir_fd: int) -> None:
        written(server.directory / SNAPSHOT)
        rmdir(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", write_first)
        server.end()
    assert (server.directory / SNAPSHOT).exists()
    world.server().end()
    assert not server.directory.exists()


def test_without_locks_nothing_is_taken_for_abandoned(world: World, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (abandoned,) = world.abandoned()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    server = world.server()
    server.end()
    assert not server.directory.exists()
    assert abandoned.is_dir()


def test_a_directory_that_cannot_be_marked_or_kept_private_is_not_left_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    world.server().end()
    before = world.listing()
    with monkeypatch.context() as patch:
        patch.setattr(private_directory, "_text", full)
        with pytest.raises(OSError, match="No space left"):
            private_directory.make(world.parent, "run-")
    assert world.listing() == before
    with monkeypatch.context() as patch:  # as a file system does that knows no modes
        patch.setattr(private_directory, "_hold", lambda descriptor: os.fchmod(descriptor, 0o777))
        with pytest.raises(OSError, match="for this user alone"):
            private_directory.make(world.parent, "run-")
    assert world.listing() == before


NAMES = st.sampled_from(
    ["run-12345678", "run-", "notes", SNAPSHOT, "9-0123abcd.tmp", private_directory.MARKER, "vllm-async-spec-main"]
)


@given(st.lists(st.tuples(st.integers(0, 5), NAMES, st.sampled_from(sorted(KINDS))), max_size=12))
def test_whatever_is_there_only_clean_directories_of_killed_servers_go(planted: list[tuple[int, str, str]]):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = World(Path(folder), patch)
        abandoned = world.abandoned(3)
        clean = set(abandoned)
        for where, name, kind in planted:
            place = [world.temporary, world.home, world.parent, *abandoned][where]
            try:
                KINDS[kind](place / name, world.home)
            except FileExistsError:
                continue
            if not (run_directory._FILES.fullmatch(name) and kind == "file"):
                clean.discard(place)
        before = world.listing()
        world.server().end()
        gone = {path.relative_to(world.root) for path in clean}
        expected = {name: entry for name, entry in before.items() if not gone & {Path(name), *Path(name).parents}}
        assert world.listing() == expected
        assert sum(map(is_directory, before.values())) - sum(map(is_directory, expected.values())) == len(clean)


RACE = """
import json, os, sys, tempfile
from pathlib import Path

from vllm_async_spec.vllm_plugin.metrics import run_directory

for round in range(int(sys.argv[1])):
    tempfile.tempdir = tempfile.mkdtemp(dir=sys.argv[2])
    start, go = os.pipe()
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            os.close(go)
            os.read(start, 1)  # until the other end is closed
            made = run_directory.run_directory()
            Path(made, f"{os.getpid()}-0123abcd.json").touch()
            os._exit(made.parent.name != f"vllm-async-spec.{os.geteuid()}")
        children.append(child)
    os.close(go)
    codes = [os.waitpid(child, 0)[1] for child in children]
    run_directory.run_directory()
    found = sorted(str(path.relative_to(tempfile.tempdir)) for path in Path(tempfile.tempdir).rglob("*"))
    print(json.dumps([codes, len(found)]))
"""


def test_servers_that_start_at_once_share_one_parent(tmp_path: Path):
    command = [sys.executable, "-c", RACE, "25", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # The parent, its marker, and the last server's directory with its marker: the six ended without removing theirs.
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[[0] * 6, 4]] * 25


def test_status_leaves_a_checkout_and_the_folder_of_an_audit_alone(world: World):
    """As it was found: both were gone after it."""
    pytest.importorskip("vllm", reason="status describes an installed vLLM")
    (world.root / "work").mkdir()
    with tempfile.TemporaryDirectory(prefix="vllm-async-spec-audit-", dir=world.temporary) as audit:
        written(Path(audit, "worker.json"))
        os.utime(audit, (0, 0))
        before = listing(world.temporary)
        environment = os.environ | {"TMPDIR": str(world.temporary), "HOME": str(world.home)}
        done = subprocess.run(
            [*COMMAND, "status"], capture_output=True, text=True, env=environment, cwd=world.root / "work"
        )
        assert done.returncode in (0, 1), done.stderr
        after = listing(world.temporary)
    assert {path: after[path] for path in before} == before
    ours = {path for path in after if path.startswith(world.parent.name)}
    assert ours == {world.parent.name, f"{world.parent.name}/{private_directory.MARKER}"}
