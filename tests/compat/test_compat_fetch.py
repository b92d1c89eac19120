"""Which releases can be fetched; nothing is downloaded here."""

import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_async_spec.compat import fetch

ROOT = Path(__file__).parents[2]
TAGS = ("manylinux_2_24", "manylinux_2_28", "manylinux_2_31", "manylinux_2_35", "manylinux_2_39")
"""Of 0.21; of 0.22 on; of 0.12 to 0.19; of 0.20; of no release so far."""


def test_pip_is_asked_for_the_tag_of_every_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> None:
        asked.append(command)
        raise fetch.FetchError("no download")

    monkeypatch.setattr(fetch, "_pip", lambda: ["pip"])
    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(fetch.FetchError, match="no download"):
        fetch.fetch_release("0.21.0", tmp_path)
    assert {f"--platform={tag}_x86_64" for tag in TAGS} <= set(asked[0])


def test_the_makefile_has_the_same_releases():
    lists = dict(re.findall(r"^(RELEASES|COMPAT) \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert lists == {"RELEASES": " ".join(fetch.TESTED), "COMPAT": " ".join(fetch.RELEASES)}


@pytest.mark.parametrize("version", ["0.11.2", "newest", "../0.21.0", "0.21.0/../..", ""])
def test_what_is_no_release_is_refused_by_name(version: str, tmp_path: Path):
    with pytest.raises(fetch.FetchError, match=re.escape(f"{version!r} is not a vLLM release since 0.12.0; name one")):
        fetch.fetch_release(version, tmp_path)


def test_a_cache_that_can_not_be_written_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    assert fetch.main(["--cache", "/proc/cache", "0.21.0"]) == 1
    assert "--cache is '/proc/cache', which can't be written (" in capsys.readouterr().err


Answer = Callable[[list[str]], subprocess.CompletedProcess[str]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    monkeypatch.setattr(fetch, "_pip", lambda: ["pip"])

    def answer(function: Answer) -> None:
        monkeypatch.setattr(fetch.subprocess, "run", lambda command, **options: function(command))

    return answer


def done(code: int = 0, out: str = "", err: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, out, err)


def test_the_latest_is_the_newest_that_pip_lists(tmp_path: Path, pip: Callable[[Answer], None]):
    asked: list[list[str]] = []

    def answer(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if "index" in command:
            return done(out="vllm (0.9.2)\nAvailable versions: 0.9.2, 0.100.0, 0.33.0\n  INSTALLED: 0.32.0\n")
        (folder,) = (option.removeprefix("--dest=") for option in command if option.startswith("--dest="))
        with zipfile.ZipFile(Path(folder) / "vllm.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", "")
            wheel.writestr("vllm/_C.abi3.so", "")
            wheel.writestr("vllm-0.100.0.dist-info/METADATA", "")
        return done()

    pip(answer)
    assert fetch.fetch_release(fetch.LATEST, tmp_path) == tmp_path / "0.100.0"
    assert "vllm==0.100.0" in asked[-1]
    files = {str(path.relative_to(tmp_path / "0.100.0")) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"vllm/__init__.py", "vllm-0.100.0.dist-info/METADATA"}


def late(command: list[str]) -> subprocess.CompletedProcess[str]:
    raise subprocess.TimeoutExpired(command, 120)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (late, "no answer within 120 seconds"),
        (lambda command: done(1, err="WARNING: slow\nERROR: No matching distribution found for vllm\n"), "No matching"),
        (lambda command: done(out="nothing of the kind"), "it lists none"),
    ],
)
def test_without_an_index_one_sentence_says_so(answer: Answer, why: str, tmp_path: Path, pip: Callable[[Answer], None]):
    pip(answer)
    with pytest.raises(fetch.FetchError, match=f"^pip can't list the releases of vLLM: {why}"):
        fetch.fetch_release(fetch.LATEST, tmp_path)
