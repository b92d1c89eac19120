"""Where output goes."""

import json
import re
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import audit_reports
import pytest
from typer.testing import CliRunner

from benchmarks import cli as benchmarks
from benchmarks.arms import PlanError
from benchmarks.plans import find_plan
from benchmarks.results import ResultFile
from vllm_async_spec.audit.report import Report
from vllm_async_spec.cli import app
from vllm_async_spec.cli.common import distinct_files
from vllm_async_spec.cli.interrupts import Interrupted
from vllm_async_spec.cli.outputs import OutputError, check_file, check_folder, write_output

READ_ONLY = Path("/proc/sys/kernel/osrelease")
"""A file that not even root can write."""


@pytest.mark.parametrize(
    ("check", "path", "why"),
    [
        (check_file, "/no/such/file", "whose directory does not exist; create the directory, or name another"),
        (check_file, "/tmp", "which is a directory; name a file"),
        (check_file, str(READ_ONLY), "which can't be written (Permission denied); name a file that can"),
        (check_file, "/tmp/" + 300 * "a", "which can't be written (File name too long); name a file that can"),
        (check_file, "/proc/new", "which can't be written ("),
        (check_folder, f"{READ_ONLY}/deeper/folder", f"but {READ_ONLY} is not a directory; name another"),
        (check_folder, "/proc/new/folder", "which can't be written ("),
    ],
)
def test_what_can_not_be_written_is_refused(check: Any, path: str, why: str):
    with pytest.raises(OutputError, match=re.escape(f"--out is {path!r}, {why}")):
        check("--out", Path(path))


def test_a_check_leaves_everything_as_it_was(tmp_path: Path):
    (tmp_path / "old").write_text("kept")
    for name in ("old", "new"):
        check_file("--json", tmp_path / name)
    check_folder("--out", tmp_path / "folder" / "inside")
    check_file("--json", Path("/dev/stdout"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "kept"}


@pytest.mark.parametrize("lost", ["the disk is full", "its directory is gone", "the temporary directory is full too"])
def test_what_can_not_be_written_is_kept_elsewhere(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere" if "too" in lost else tmp_path))
    name = 80 * "\N{EURO SIGN}" + ".json"  # 245 bytes, of at most 255
    path = tmp_path / "gone" / name if "gone" in lost else Path("/dev/full")
    said = write_output("--json", path, "{}")
    assert said is not None
    why = "No such file or directory" if "gone" in lost else "No space left on device"
    assert said.startswith(f"--json is {str(path)!r}, which can't be written ({why}); ")
    if "too" in lost:
        both = "the temporary directory can't keep this output either (No such file or directory)"
        assert said.endswith(f"{both}, so this output is lost")
        return
    kept = Path(said.rpartition(" is kept in ")[2])
    assert kept.read_text() == "{}"
    assert kept.parent == tmp_path
    assert kept.suffix == path.suffix
    assert kept.stat().st_mode & 0o777 == 0o600


def test_an_output_that_names_a_file_of_other_bytes_is_written(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        said = write_output("--html", folder / "report.html", "\udcff.html")
        path = Path(said.rpartition(" ")[2]) if said else folder / "report.html"
        assert path.read_text() == r"\udcff.html"


@pytest.mark.parametrize("existed", [False, True])
def test_no_part_of_a_new_file_is_left(existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "found.json"
    if existed:
        path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        said = write_output("--json", path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said is not None
    assert "which can't be written (File too large)" in said
    assert path.exists() == existed


PROGRAMS = {"vllm-async-spec": app, "benchmarks": benchmarks.app}


@pytest.mark.parametrize(
    "command",
    [
        *(f"vllm-async-spec audit --model m {option}" for option in ("--json", "--html", "--trace", "--log")),
        *(f"vllm-async-spec compat {option}" for option in ("--json", "--markdown", "--junit", "--html", "--badge")),
        "vllm-async-spec demo --cache",
        "benchmarks run overhead-tiny --out",
        "benchmarks run overhead-tiny --cache",
        "benchmarks soak tiny --out",
        "benchmarks features --out",
        "benchmarks trace static --out",
        "benchmarks held --json",
        "benchmarks generation --json",
    ],
)
def test_every_option_is_checked_before_work_starts(command: str):
    program, *arguments = command.split()
    path = str(READ_ONLY / "deeper") if arguments[0] in ("demo", "run", "soak", "features") else "/tmp"
    done = CliRunner().invoke(PROGRAMS[program], [*arguments, path])
    assert done.exit_code == (2 if program == "vllm-async-spec" else 1)
    assert done.stderr.startswith(f"{program}: {arguments[-1]} is {path!r}, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["audit --url x --json same --html", "audit --model m --log same --json", "compat --html same --badge"]
)
def test_two_options_do_not_name_one_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("same")
    done = CliRunner().invoke(app, [*command.split(), "link"])
    first, _, second = command.split()[-3:]
    assert done.stderr == f"vllm-async-spec: {first} and {second} both name 'link'; name two files\n"
    distinct_files(dict.fromkeys((first, second), Path("/dev/null")))


def test_an_audit_that_fills_the_disk_is_shown_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found: Report = audit_reports.waiting()
    monkeypatch.setattr("vllm_async_spec.audit.launch.audit_server", lambda *arguments, **more: found)
    files = ["--json", "/dev/full", "--html", str(tmp_path / "page.html")]
    done = CliRunner().invoke(app, ["audit", "--url", "http://x", *files])
    assert done.exit_code == 1
    assert "critical waits" in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vllm-async-spec: ")]
    kept = Path(line.rpartition(" is kept in ")[2])
    assert found.command in kept.read_text().replace('\\"', '"')
    assert (tmp_path / "page.html").is_file()


def test_turns_that_can_not_be_written_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = ResultFile(Path("/proc/new/plan.json"), find_plan("overhead-tiny"))
    turn = {"pass": 0, "arm": result.document["plan"]["arms"][0]["name"], "error": "too early"}
    with pytest.raises(
        PlanError, match=r"^/proc/new/plan.json can't be written \(.*\); this output is kept in "
    ) as lost:
        result.add(turn, "the command")
    kept = json.loads(Path(str(lost.value).rpartition(" is kept in ")[2]).read_text())
    assert kept["turns"] == [turn]


def test_an_interrupted_run_says_that_it_keeps_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object, **more: object) -> bool:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("benchmarks.runner.Runner.run", interrupted)
    monkeypatch.setattr("benchmarks.runner.Runner.lacks", lambda *arguments: None)
    done = CliRunner().invoke(benchmarks.app, ["run", "overhead-tiny", "--out", str(tmp_path)])
    assert done.exit_code == 143
    assert done.stderr == (
        "benchmarks: interrupted by SIGTERM; finished turns are kept, and the same command runs the rest\n"
    )
