"""The pytest plugin: in a backend's own repository, and as the suite itself."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from compat_command import needs_vllm

from vllm_async_spec.compat.vllm_source import installed_vllm

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "backend"


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


# Each leaves the example's other half as it is, and is found by another part of the suite.
BROKEN = """
import paged_rows
import torch


class OneKeyTooFew(paged_rows.PagedRowsImpl):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales):
        attn_metadata.seq_lens = attn_metadata.seq_lens - 1
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)


class WrongBackend(paged_rows.PagedRowsBackend):
    get_impl_cls = staticmethod(lambda: OneKeyTooFew)


class WaitingImpl(paged_rows.PagedRowsImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        real = slot_mapping >= 0
        super().do_kv_cache_update(layer, key[real], value[real], kv_cache, slot_mapping[real])


class WaitingBackend(paged_rows.PagedRowsBackend):
    get_impl_cls = staticmethod(lambda: WaitingImpl)
"""


@needs_vllm
def test_the_example_passes_its_own_tests_and_as_it_began_fails_them():
    both = [f"--async-spec-backend=paged_rows:{kind}" for kind in ("PagedRowsBackend", "WaitingMetadataBuilder")]
    done = run_pytest(EXAMPLE, *both, "-rf")
    assert outcome(done) == {"passed": 3, "failed": 3}, done.stdout + done.stderr
    failed = re.findall(r"FAILED \S+\[paged_rows:(\w+)\]", done.stdout)
    assert failed == ["WaitingMetadataBuilder"] * 3
    source = (EXAMPLE / "paged_rows.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "seq_lens.max().item()" in text)
    assert f"it waits: read (item) at backend/paged_rows.py:{line}" in done.stdout
    assert "; instead: build from device seq_lens or seq_lens_cpu_upper_bound" in done.stdout


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("WrongBackend", "told upper bound, attention is wrong: it differs by up to"),
        ("WaitingBackend", "told upper bound, in its forward it waits: read (boolean index) at "),
    ],
)
def test_a_fault_in_the_examples_forward_fails_its_tests(name: str, sentence: str, tmp_path: Path):
    package = shutil.copytree(EXAMPLE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "broken.py").write_text(BROKEN)
    done = run_pytest(package, f"--async-spec-backend=broken:{name}", "-k", "no_host_sync")
    assert outcome(done) == {"failed": 1}, done.stdout + done.stderr
    assert sentence in done.stdout


@needs_vllm
@pytest.mark.slow
def test_one_of_vllms_own_is_tried_as_on_a_gpu(tmp_path: Path):
    """In a new process; this one's vLLM leaves out Triton, which the builder needs."""
    (tmp_path / "test_it.py").write_text(
        "import vllm\n\ndef test_it(async_spec_backend): assert async_spec_backend.verdict == 'none'\n"
    )
    done = run_pytest(tmp_path, "--async-spec-backend", "FLASHINFER_TRTLLM")
    assert outcome(done) == {"passed": 1}, done.stdout + done.stderr


def test_the_example_is_a_package(tmp_path: Path):
    pytest.importorskip("setuptools.build_meta", reason="setuptools is not installed")
    package = shutil.copytree(EXAMPLE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "paged_rows-0.1-py3-none-any.whl") as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".py")] == ["paged_rows.py"]
        points = wheel.read("paged_rows-0.1.dist-info/entry_points.txt").decode()
    assert points.split() == ["[vllm.general_plugins]", "paged_rows", "=", "paged_rows:register"]


@needs_vllm
def test_the_example_names_its_own_backend():
    done = run_pytest(EXAMPLE, "--collect-only", "-q")
    assert "test_no_host_sync[paged_rows:PagedRowsBackend]" in done.stdout


def test_the_suite_itself(tmp_path: Path):
    backends = ["compat_planted:Clean", "compat_planted:OnlyDrafting", "compat_failing:FailsAtCapture"]
    named = [f"--backend={backend}" for backend in backends]
    (tmp_path / "test_it.py").write_text("def test_it(async_spec_backend): assert async_spec_backend.passed\n")
    done = run_pytest(tmp_path, "--pyargs", "vllm_async_spec.compat", "test_it.py", *named, "-rf")
    # Of three builders all batches, the construction, the lines not reached, and one test; one builder waits while
    # drafting, one fails at capture.
    assert outcome(done) == {"passed": 57, "failed": 6}, done.stdout + done.stderr
    failed = re.findall(r"FAILED \S+::test_no_host_sync\[(.+?)\] ", done.stdout)
    assert failed == [
        *(f"{backends[1]}-draft step {step}" for step in (2, 3)),
        *(f"{backends[2]}-capture, {tokens}" for tokens in ("one token", "K + 1")),
    ], done.stdout
    assert re.findall(r"FAILED test_it.py::test_it\[(.+?)\] ", done.stdout) == backends[1:]
    assert "told exact lengths, it fails: ValueError: no graphs at support/compat_failing.py:" in done.stdout


def test_the_suite_in_processes_of_xdist(tmp_path: Path):
    options = ["--backend=compat_planted:Clean", "-n", "2", "-k", "decode"]
    done = run_pytest(tmp_path, "--pyargs", "vllm_async_spec.compat", *options)
    assert outcome(done) == {"passed": 1}, done.stdout + done.stderr


def test_lines_that_no_batch_reached(tmp_path: Path):
    code = "def test_it(async_spec_backend): assert not async_spec_backend.unreached, async_spec_backend.explain()\n"
    (tmp_path / "test_it.py").write_text(code)
    options = ["-k", "test_it or test_every_line", "-rs", "--backend=compat_unreached:Thresholds"]
    done = run_pytest(tmp_path, "--pyargs", "vllm_async_spec.compat", "test_it.py", *options)
    # By itself such a line is no failure; a test of the author's makes it one.
    assert outcome(done) == {"passed": 1, "failed": 1, "skipped": 1}, done.stdout + done.stderr
    assert done.stdout.count("copy to host (cpu): metadata.seq_lens.cpu()") >= 2
    assert "not shown clean, no batch reached support/compat_unreached.py:" in done.stdout


SETTINGS = "VLLM_ASYNC_SPEC", "VLLM_LOGGING_LEVEL", "VLLM_HAS_FLASHINFER_CUBIN", "VLLM_PLUGINS"
STOCK = """
import os

import compat_planted


class Stock(compat_planted.Clean):
    def extra(self, metadata):
        assert [os.environ.get(name) for name in VARIABLES] == VALUES


class Again(Stock):
    pass
"""
SESSION = """
import os


def settings():
    return {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "CUDA_"))}


BEFORE = settings()


def test_it(async_spec_backend):
    assert async_spec_backend.passed, async_spec_backend.explain()
    assert settings() == BEFORE
"""


@pytest.mark.parametrize(
    ("unpacked", "set_to"),
    [(False, ["off", "ERROR", "1", "mine"]), pytest.param(True, [None, "ERROR", "1", ""], marks=needs_vllm)],
)
def test_the_suites_settings_are_not_the_sessions(
    unpacked: bool, set_to: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in (*SETTINGS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    (tmp_path / "stock.py").write_text(STOCK.replace("VARIABLES", repr(SETTINGS)).replace("VALUES", repr(set_to)))
    (tmp_path / "test_it.py").write_text(SESSION)
    source = [f"--async-spec-source={installed_vllm()}"] if unpacked else []
    named = [f"--async-spec-backend=stock:{kind}" for kind in ("Stock", "Again")]
    done = run_pytest(tmp_path, *named, *source)
    assert outcome(done) == {"passed": 2}, done.stdout + done.stderr


LATER = """
def test_it(async_spec_backend):
    from vllm.plugins import load_general_plugins
    from vllm_async_spec.vllm_plugin.state import active_plugin

    load_general_plugins()  # as a later engine's configuration does
    assert active_plugin().settings.mode.value == "auto"
"""


@needs_vllm
def test_a_later_engine_of_the_session_loads_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    shutil.copy(EXAMPLE / "paged_rows.py", tmp_path)
    (tmp_path / "test_it.py").write_text(LATER)
    done = run_pytest(tmp_path, "--async-spec-backend=paged_rows:PagedRowsMetadataBuilder")
    assert outcome(done) == {"passed": 1}, done.stdout + done.stderr


def test_a_backend_that_is_named_twice_is_tried_once(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("def test_it(async_spec_backend): pass\n")
    names = ["triton_attn", "mine:Builder", "TRITON_ATTN", "mine:Builder"]
    done = run_pytest(tmp_path, "--collect-only", "-q", *(f"--async-spec-backend={name}" for name in names))
    assert re.findall(r"test_it\[(.+)\]", done.stdout) == ["TRITON_ATTN", "mine:Builder"], done.stdout


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
