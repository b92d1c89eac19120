"""What else removes, replaces or keeps files: only what was made here, and nothing recursive."""

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_servers import listing, written
from typer.testing import CliRunner

from benchmarks.cli import app as benchmarks
from benchmarks.results import RESULTS
from benchmarks.stored import read_json
from vllm_async_spec.cli import app
from vllm_async_spec.demo import train

ROOT = Path(__file__).parents[1]

REMOVALS = {
    "benchmarks/results.py": ["os.replace"],  # a result by its next turn's
    "benchmarks/stored.py": [
        "partial.replace",  # an archive by one with all that it had
        "path.unlink",  # a result of this checkout's own, which the archive has now
    ],
    "vllm_async_spec/audit/engine.py": ["done.unlink"],  # in a TemporaryDirectory of its own
    "vllm_async_spec/vllm_plugin/audit_agent/run.py": ["done.unlink"],  # likewise
    "vllm_async_spec/compat/keep.py": [  # a file in a directory of its own, or a report by its next
        "partial.replace",
        "self._path.parent.rmdir",
        "self._path.unlink",
    ],
    "vllm_async_spec/compat/fetch.py": ["unpacked.rename"],  # from a TemporaryDirectory to where nothing is
    "vllm_async_spec/cli/outputs.py": ["path.unlink"],  # a part of a file that the same call has created
    "vllm_async_spec/demo/checkpoint.py": [
        "fresh.replace",  # a checkpoint of this training by the next
        "fresh.unlink",  # a temporary file that we made
    ],
    "vllm_async_spec/demo/train.py": [
        "checkpoint.unlink",  # of the training that has just ended
        "fresh.rename",  # to where nothing is
    ],
    "vllm_async_spec/cli/patches.py": ["os.replace"],  # the lock file and README by newer ones, when asked
    "vllm_async_spec/vllm_plugin/metrics/private_directory.py": [
        "fresh.rename",  # to where nothing is
        "os.rmdir",  # a marked directory, which is empty
        "os.unlink",  # a file that we wrote, in one; and a marker
        "os.unlink",
        "path.rmdir",  # what has just been made
    ],
    "vllm_async_spec/vllm_plugin/metrics/publisher.py": ["unfinished.replace"],  # a snapshot by the next
}
"""Every removal and rename of the package and the benchmarks, and why it is harmless."""

_NAMES = {"rmtree", "move", "unlink", "rmdir", "removedirs", "rename", "renames"}


def removals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, name = ast.unparse(node.func), node.func.attr
            # A path's `replace` has one argument, a string's two; a list has `remove`.
            replaces = name == "replace" and len(node.args) == 1 and not node.keywords and "file" not in called
            if name in _NAMES or called in ("os.remove", "os.replace") or replaces:
                yield called


def test_each_removal_is_known_to_be_harmless():
    sources = [*(ROOT / "vllm_async_spec").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    sources += [*ROOT.glob("*.py"), *(ROOT / "docs").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): sorted(removals(path)) for path in sources}
    assert {name: calls for name, calls in found.items() if calls} == REMOVALS


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_clean_removes_nothing_outside_the_checkout(tmp_path: Path):
    checkout, home = tmp_path / "checkout", tmp_path / "home"
    written(checkout / "Makefile", (ROOT / "Makefile").read_text())
    for name in ("README.md", "dist/mine.whl"):
        written(checkout / name)
    for name in (".cache/precious", "venv/bin/python", "models/weights"):
        written(home / name)
    before = listing(tmp_path)
    for name in (".venv/bin/python", ".cache/releases/0.32.0/vllm/__init__.py", "site/index.html"):
        written(checkout / name)
    (checkout / ".cache" / "models").symlink_to(home / "models")
    named = {"VENV": str(home / "venv"), "CACHE": str(home / ".cache")}
    done = subprocess.run(
        ["make", "--no-print-directory", "clean"],
        cwd=checkout,
        env=os.environ | named,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listing(tmp_path) == before
    assert done.stdout.splitlines()[1:] == [f"left alone: {path}" for path in named.values()]


@pytest.mark.parametrize(
    "content", ["", "not JSON", "[1]", '"plan"', '{"name": "package"}', '{"schema": 1}', '{"schema": 0, "plan": {}}']
)
@pytest.mark.parametrize("options", [["--fresh"], []])
def test_a_benchmark_throws_nothing_away_that_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, options: list[str]
):
    monkeypatch.setattr("benchmarks.cli.results.Runner.run", lambda runner, **_: False)
    path = written(tmp_path / "package.json", content)
    before = listing(tmp_path)
    done = CliRunner().invoke(
        benchmarks, ["run", "overhead-tiny", "--out", str(tmp_path), "--name", "package", *options]
    )
    assert done.exit_code == 1
    assert str(path) in done.output
    assert "Traceback" not in done.output
    assert listing(tmp_path) == before


def test_a_fresh_run_keeps_the_result_until_it_has_a_turn_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    turn = {"pass": 0, "arm": "stock", "error": "made up"}
    before = json.dumps(read_json(RESULTS / "overhead-cpu-vllm-0.32.0.json"))
    path = written(tmp_path / "mine.json", before)
    command = ["run", "overhead-tiny", "--out", str(tmp_path), "--name", "mine", "--fresh"]
    monkeypatch.setattr("benchmarks.cli.results.Runner.run", lambda runner, **_: True)
    assert CliRunner().invoke(benchmarks, command).exit_code == 0
    assert path.read_text() == before
    monkeypatch.setattr("benchmarks.cli.results.Runner.run", lambda runner, **_: runner._result.add(turn, "command"))
    CliRunner().invoke(benchmarks, command)
    assert json.loads(path.read_text())["turns"] == [turn]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({}, "home/.cache/vllm-async-spec"), ({"XDG_CACHE_HOME": "kept"}, "kept/vllm-async-spec")],
)
def test_the_demo_keeps_its_models_where_only_this_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
):
    asked: list[Path] = []

    def prepare_models(folder: Path, **_: Any) -> None:
        asked.append(folder)
        raise OSError("enough")

    monkeypatch.setattr(train, "prepare_models", prepare_models)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert CliRunner().invoke(app, ["demo"]).exit_code == 1
    assert asked == [tmp_path / folder]
