"""A run that is stopped or killed keeps what it had."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import compat_planted as planted
import pytest
from compat_checked import checked, report
from compat_command import SUPPORT, compat, in_support

from vllm_async_spec.compat import keep
from vllm_async_spec.compat.keep import KeptResults
from vllm_async_spec.compat.publish import main as publish
from vllm_async_spec.compat.report import PublishedError, Report, read_runs

__all__ = ["in_support"]  # a fixture
pytestmark = pytest.mark.usefixtures("in_support")

BEFORE = ["decode", "spec K + 1", "non-uniform spec", "prefill", "prefill with context", "mixed", "long"]
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def batches(path: Path) -> dict[str, list[str]]:
    found: Any = json.loads(path.read_text())
    return {each["backend"]: [case["case"] for case in each["cases"]] for each in found["backends"]}


@pytest.mark.parametrize(
    ("name", "said", "code"),
    [
        ("Ends", "stopped by SIGTERM", 143),
        ("Interrupts", "stopped by SIGINT", 130),
        ("HangsUp", "stopped by SIGHUP", 129),
    ],
)
def test_a_run_that_is_stopped_says_where_its_results_are(name: str, said: str, code: int, tmp_path: Path):
    before = [signal.getsignal(number) for number in SIGNALS]
    path = tmp_path / "found.json"
    named = [f"--backend=compat_planted:{kind}" for kind in ("Clean", "CopiesToHost")]
    result = compat(*named, f"--backend=compat_stopping:{name}", "--backend=compat_planted:Item", "--json", str(path))
    assert result.exit_code == code, result.output
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert result.stderr == (
        f"vllm-async-spec: {said}; the results so far, of 2 of 4 builders to the end, are in {path}\n"
    )
    assert "2 not tried, because the run was stopped" in result.stdout.replace("\n", " ")
    found = batches(path)
    assert list(found) == ["compat_planted:Clean", "compat_planted:CopiesToHost", f"compat_stopping:{name}"]
    assert (len(found["compat_planted:Clean"]), found[f"compat_stopping:{name}"][:7]) == (18, BEFORE)
    assert "256 requests" not in found[f"compat_stopping:{name}"]
    assert json.loads(path.read_text())["not_tried"] == [f"compat_stopping:{name}", "compat_planted:Item"]
    with pytest.raises(PublishedError, match=rf"the run was stopped in compat_stopping:{name}; run the suite again"):
        read_runs([path])
    (tmp_path / "compat").mkdir()
    assert publish(["--docs", str(tmp_path), str(path)]) == 2


def test_without_a_file_the_results_are_kept_in_a_private_one():
    result = compat("--backend=compat_stopping:Ends")
    assert result.exit_code == 143, result.output
    where = re.search(r"to the end, are in (\S+)$", result.stderr.strip())
    assert where is not None
    path = Path(where[1])
    assert batches(path)["compat_stopping:Ends"][:7] == BEFORE
    assert path.parent.stat().st_mode & 0o077 == 0
    path.unlink()
    path.parent.rmdir()


def test_a_run_that_is_killed_outright_keeps_what_it_had(tmp_path: Path):
    path = tmp_path / "found.json"
    code = (
        "import sys; sys.argv[0] = 'vllm-async-spec'; from vllm_async_spec.compat import keep; keep._SECONDS = 0.0;"
        "from vllm_async_spec.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "compat", "--backend=compat_stopping:Kills", "--json", str(path)]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert batches(path)["compat_stopping:Kills"][:7] == BEFORE
    assert json.loads(path.read_text())["not_tried"] == ["compat_stopping:Kills"]


def test_a_run_that_ends_leaves_no_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(keep, "_SECONDS", 0.0)
    monkeypatch.setattr(keep.tempfile, "tempdir", str(tmp_path))
    result = compat("--backend=compat_planted:Clean")
    assert result.exit_code == 0, result.output
    said = re.findall(r"The results so far are kept in (\S+);", result.stderr)
    assert len(said) == 1
    assert Path(said[0]).is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_as_a_whole_and_not_for_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, made = tmp_path / "found.json", []

    def so_far() -> Report:
        made.append(1)
        found = (checked(planted.Clean, "decode"),)
        return report(*found)

    monkeypatch.setattr(keep, "_SECONDS", float("inf"))
    kept = KeptResults(path, pytest.fail)
    assert kept.stop() is None
    for _ in range(9):
        kept(so_far)
    assert (made, path.exists()) == ([], False)
    left = kept.stop()
    assert left is not None
    assert left[1] == path
    assert list(tmp_path.iterdir()) == [path], "no part of a file is left"
    kept.discard()
    assert path.exists(), "a file that was named is the user's"


@pytest.mark.parametrize("where", ["a pipe", "a removed directory"])
def test_results_that_can_not_be_kept_in_the_file_are_kept_elsewhere(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "pipe" if where == "a pipe" else tmp_path / "gone" / "found.json"
    if where == "a pipe":
        os.mkfifo(path)
    said: list[str] = []
    kept = KeptResults(path, said.append)
    kept(report)
    left = kept.stop()
    assert left is not None
    assert left[1] is not None
    assert left[1].name == "compat.json"
    assert said == [f"The results so far are kept in {left[1]}; --json FILE keeps them in FILE."]
    assert path.is_fifo() == (where == "a pipe")
    kept.discard()
    assert not left[1].exists()


def test_a_run_goes_on_where_no_results_can_be_kept(monkeypatch: pytest.MonkeyPatch):
    def mkdtemp(*_arguments: Any, **_named: Any) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(keep, "_SECONDS", 0.0)
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    result = compat("--backend=compat_planted:Clean")
    assert result.exit_code == 0, result.output
    said = "The results so far are not kept, because the temporary directory can't be written ([Errno 30] Read-only"
    assert result.stderr.startswith(said)
    assert result.stderr.endswith("); free space there, or set TMPDIR to another.\n")
    assert result.stderr.count("\n") == 1
    result = compat("--backend=compat_stopping:Ends")
    assert result.exit_code == 143, result.output
    assert result.stderr.endswith(
        "stopped by SIGTERM; the results so far, of 0 of 1 builders to the end, are not kept\n"
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_full_disk_leaves_no_part_of_a_file(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write_text(path: Path, text: str, **_how: Any) -> int:
        path.write_bytes(text.encode()[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(keep, "_SECONDS", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "found.json"
    said: list[str] = []
    kept = KeptResults(path if named else None, said.append)
    kept(report)
    whole = list(tmp_path.rglob("*.json"))
    assert len(whole) == 1
    monkeypatch.setattr(Path, "write_text", write_text)
    for _ in range(3):
        kept(report)
    assert list(tmp_path.iterdir()) == ([path] if named else [])
    told = [sentence for sentence in said if "are not kept" in sentence]
    assert len(told) == 1
    assert "[Errno 28] No space left on device" in told[0]
    left = kept.stop()
    assert left is not None
    assert left[1] is None
    kept.discard()
