"""Standard output that can't take what a command prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUDIT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import audit_reports
from vllm_async_spec.audit import launch
from vllm_async_spec.cli import main
launch.audit_server = lambda *arguments, **more: audit_reports.waiting()
main()
"""
MAIN = "from vllm_async_spec import cli; cli.app = lambda: {}; cli.main()"


def run(code: str, *arguments: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    # Read as Latin-1, any output is text.
    return subprocess.run(command, stdout=stdout, stderr=-1, encoding="latin-1", env=os.environ | env, check=False)


def test_an_audit_is_shown_in_ascii():
    done = run(AUDIT, "audit", "--url", "http://x", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"\xb5s" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", r"\xb1 \u2026 \udcff"), ("latin-1", "\xb1 " + r"\u2026 \udcff"), ("utf-8", "\xc2\xb1 ")],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_an_encoding_lacks_is_escaped(encoding: str, shown: str, stream: str):
    text = r"'\xb1 \u2026 \udcff'"
    done = run(MAIN.format(f"print({text}, file=__import__('sys').{stream})"), PYTHONIOENCODING=f"{encoding}:strict")
    assert done.returncode == 0
    assert getattr(done, stream).startswith(shown)
    assert getattr(done, stream).endswith(" \\udcff\n")


@pytest.mark.parametrize("arguments", ["patches list", "patches list --json", "--help", "--version"])
def test_an_output_that_can_not_be_written_is_one_sentence(arguments: str):
    with open("/dev/full", "w") as full:
        done = run("from vllm_async_spec.cli import main; main()", *arguments.split(), stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == (
        "vllm-async-spec: standard output can't be written (No space left on device); send it elsewhere\n"
    )


def test_another_error_is_not_taken_for_one_of_the_output():
    done = run(MAIN.format("open('/nowhere')"))
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr
