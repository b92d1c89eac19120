"""The pytest plugin: in a backend's own repository, and as the suite itself."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "backend"
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where the plugin is loaded by its name, as its entry point loads it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "pytest", "-p", "pytest_async_spec", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    return {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}


@needs_vllm
def test_the_example_passes_its_own_tests_and_as_it_began_fails_them():
    both = [f"--async-spec-backend=paged_rows:{kind}MetadataBuilder" for kind in ("PagedRows", "Waiting")]
    done = run_pytest(EXAMPLE, *both, "-rf")
    assert outcome(done) == {"passed": 2, "failed": 2}, done.stdout + done.stderr
    failed = re.findall(r"FAILED \S+\[paged_rows:(\w+)\]", done.stdout)
    assert failed == ["WaitingMetadataBuilder"] * 2
    source = (EXAMPLE / "paged_rows.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "indptr[-1].item()" in text)
    assert f"it waits: read (item) at backend/paged_rows.py:{line}" in done.stdout


def test_the_example_is_a_package(tmp_path: Path):
    """Of the builder alone; its tests stay in its repository."""
    pytest.importorskip("setuptools.build_meta", reason="setuptools is not installed")
    package = shutil.copytree(EXAMPLE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "paged_rows-0.1-py3-none-any.whl") as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".py")] == ["paged_rows.py"]


@needs_vllm
def test_the_example_names_its_own_builder():
    done = run_pytest(EXAMPLE, "--collect-only", "-q")
    assert "test_no_host_sync[paged_rows:PagedRowsMetadataBuilder]" in done.stdout


def test_the_suite_itself(tmp_path: Path):
    backends = ["compat_planted:Clean", "compat_planted:OnlyDrafting", "compat_failing:FailsAtCapture"]
    named = [f"--backend={backend}" for backend in backends]
    (tmp_path / "test_it.py").write_text("def test_it(async_spec_backend): assert async_spec_backend.passed\n")
    done = run_pytest(tmp_path, "--pyargs", "vllm_async_spec.compat", "test_it.py", *named, "-rf")
    # All batches and the construction, and one test, of three builders; one waits while drafting, one fails at capture.
    assert outcome(done) == {"passed": 54, "failed": 6}, done.stdout + done.stderr
    failed = re.findall(r"FAILED \S+::test_no_host_sync\[(.+?)\] ", done.stdout)
    assert failed == [
        *(f"{backends[1]}-draft step {step}" for step in (2, 3)),
        *(f"{backends[2]}-capture, {tokens}" for tokens in ("one token", "K + 1")),
    ], done.stdout
    assert re.findall(r"FAILED test_it.py::test_it\[(.+?)\] ", done.stdout) == backends[1:]
    assert "told exact lengths, it fails: ValueError: no graphs at support/compat_failing.py:" in done.stdout


def test_no_backend_and_a_wrong_one_fail_in_a_sentence(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("def test_no_host_sync(async_spec_backend): pass\n")
    done = run_pytest(tmp_path)
    assert "no backend is named; set async_spec_backends in pytest's settings" in done.stdout
    assert outcome(done) == {"error": 1}
    done = run_pytest(tmp_path, "--async-spec-backend", "nowhere:Builder")
    assert "nowhere:Builder: there is no module 'nowhere'; install the module" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_repository_may_have_an_option_of_that_name(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--backend')\n")
    (tmp_path / "test_it.py").write_text("def test_it(request): assert request.config.getoption('backend') == 'gloo'\n")
    done = run_pytest(tmp_path, "--backend", "gloo")
    assert outcome(done) == {"passed": 1}, done.stdout + done.stderr


def test_loading_the_plugin_imports_no_torch():
    code = "import sys, pytest_async_spec; print('torch' in sys.modules, 'vllm_async_spec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
