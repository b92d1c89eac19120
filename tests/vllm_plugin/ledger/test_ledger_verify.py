"""`patches verify`."""

import dataclasses
import json
from pathlib import Path

import pytest
from ledger_source import SOURCE, spec
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner, Result

from vllm_async_spec.cli import app
from vllm_async_spec.cli import patches as cli
from vllm_async_spec.vllm_plugin.ledger import Match, PatchError, load_ledger, verify
from vllm_async_spec.vllm_plugin.ledger.entries import lock_text, read_lock


def write_vllm(path: Path, release: str | None) -> None:
    (path / "vllm").mkdir(parents=True)
    (path / "vllm" / "__init__.py").write_text("raise ImportError('never imported')")
    (path / "vllm" / "a.py").write_text(SOURCE)
    (path / "vllm" / "b.py").write_text(SOURCE.replace("tokens + 1", "tokens + 2"))
    if release is not None:
        (path / f"vllm-{release}.dist-info").mkdir()


COMPARED = [Match.SAME, Match.CHANGED, Match.CHANGED]


@pytest.mark.parametrize(
    ("release", "ranges", "found"),
    [
        (None, [], COMPARED),
        ("2.0+cu129", [">=1.0"], COMPARED),
        ("2.0+cu129", [">=1.0,<2.0"], [Match.NOT_NEEDED] * 3),
        ("2.0+cu129", [">=0.1,<0.2", ">=2.0,<2.1"], COMPARED),
    ],
)
def test_verify_compares_source_without_importing_it(tmp_path, release, ranges, found):
    write_vllm(tmp_path, release)
    specs = [
        dataclasses.replace(spec(module), ranges=tuple(map(SpecifierSet, ranges)))
        for module in ("vllm.a", "vllm.b", "vllm.c")
    ]
    assert [v.match for v in verify(specs, tmp_path)] == found
    with pytest.raises(PatchError, match="contains no vllm/"):
        verify(specs, tmp_path / "vllm")


ENTRY = """
summary = "Doubles"
why = "why"
upstream = "none"
remove_when = "never"
releases = [">=1.0"]
targets = ["vllm.a:Runner.step", "vllm.c:Runner.step"]
"""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "double.toml").write_text(ENTRY)
    (folder / "fingerprints.lock").write_text(lock_text({}))
    monkeypatch.setattr(cli, "ledger_directory", lambda: folder)
    monkeypatch.setattr(cli, "load_ledger", lambda directory=folder: load_ledger(directory))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_vllm(tmp_path / "source", "2.0")
    return tmp_path / "source"


LOCK = '{"releases": "0.7 0.8", "targets": {"vllm.a:f": {"0.7": "00", "0.9": "01"}}}'


@pytest.mark.parametrize(
    ("lock", "written"),
    [
        ({"a:f": {"0.7": "00", "0.8": "00", "0.9": "01"}}, {"a:f": {"0.7": "00", "0.9": "01"}}),
        (
            {"a:f": {"0.8": "00"}, "a:g": {"0.7": "1", "0.9": "1"}},
            {"a:f": {"0.8": "00", "0.9": None}, "a:g": {"0.7": "1", "0.8": None, "0.9": "1"}},
        ),
        ({"a:f": {"0.10": "0", "0.9": "0"}, "a:g": {}}, {"a:f": {"0.9": "0"}, "a:g": {}}),
    ],
)
def test_the_lock_has_what_each_release_changed(lock, written, tmp_path):
    text = lock_text(lock)
    assert json.loads(text)["targets"] == written
    (tmp_path / "fingerprints.lock").write_text(text)
    assert read_lock(tmp_path) == lock


def update(source: Path) -> Result:
    return CliRunner().invoke(app, ["patches", "verify", "--vllm-source", str(source), "--update"])


def test_update_writes_the_fingerprints_of_one_release_and_the_readme(ledger, source):
    (ledger / "older.toml").write_text(ENTRY.replace(">=1.0", ">=0.8,<1.0"))  # of the same targets
    step = {"0.7": "00", "0.9": "00", "1.0": "01", "2.0": "02"}
    (ledger / "fingerprints.lock").write_text(lock_text({"vllm.a:Runner.step": step, "vllm.old:f": {"1.0": "03"}}))
    done = update(source)
    assert done.exit_code == 0, done.output
    assert "read what vLLM changed in the targets of double" in done.output
    lock = read_lock(ledger)
    # 0.7 is outside the entries' ranges, 2.0 is new, and no entry names vllm.old any more.
    assert lock == {
        "vllm.a:Runner.step": {"0.9": "00", "1.0": "01", "2.0": "f069f5e2"},
        "vllm.c:Runner.step": {},
    }
    assert "| [`double`](double.toml) | Doubles | 1.0 to 2.0 | never |" in (ledger / "README.md").read_text()
    assert sorted(path.name for path in ledger.iterdir()) == [
        "README.md",
        "double.toml",
        "fingerprints.lock",
        "older.toml",
    ]
    assert "Before you commit" not in update(source).output
    assert read_lock(ledger) == lock


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda source, ledger: (source / "vllm-2.0.dist-info").rmdir(), "has no vllm-*.dist-info that names"),
        (lambda source, ledger: (source / "vllm" / "a.py").write_text(""), "vLLM 2.0 has no target of double"),
        (lambda source, ledger: (ledger / "fingerprints.lock").write_text("[]"), "is not a lock file of fingerprints"),
        (
            lambda source, ledger: (ledger / "fingerprints.lock").write_text(LOCK.replace("0.9", "1.0")),
            "is not a lock file of fingerprints: '1.0' is none of its releases",
        ),
        (
            lambda source, ledger: (ledger / "fingerprints.lock").write_text("{}"),
            "is not a lock file of fingerprints: 'releases' is missing",
        ),
        (lambda source, ledger: (ledger / "fingerprints.lock").unlink(), "No such file or directory"),
    ],
)
def test_an_update_that_cannot_be_made_says_why_and_changes_nothing(ledger, source, spoil, message):
    spoil(source, ledger)
    before = {path.name: path.read_text() for path in ledger.iterdir()}
    done = update(source)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
    assert {path.name: path.read_text() for path in ledger.iterdir()} == before


def test_a_narrow_terminal_gets_whole_names(ledger: Path, source: Path):
    name = "a-patch-with-a-name-of-fifty-characters-for-a-table"
    (ledger / "double.toml").rename(ledger / f"{name}.toml")
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["patches", "verify", "--vllm-source", str(source)])
    assert f" {name} " in shown.output
