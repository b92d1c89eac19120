"""The example of an out-of-tree backend, installed as a package, in an asynchronous engine: the tokens of CPU_ATTN."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from command_line import python_path
from results import Mode
from scenario import environment

from vllm_async_spec.demo.train import DemoModels

CHILD = Path(__file__).with_name("outside_backend.py")
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "backend"

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def installed(folder: Path) -> Path:
    """The example's wheel, unpacked: with it on the path, vLLM finds its entry point."""
    pytest.importorskip("setuptools.build_meta", reason="setuptools is not installed")
    package = shutil.copytree(EXAMPLE, folder / "package")
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=package, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def run(models: DemoModels, log: Path, *path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, CHILD, models.target, models.draft]
    variables = environment(Mode.PLUGIN) | {"PYTHONPATH": python_path(*path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=variables)


def test_the_example_gives_the_tokens_of_vllms_own_backend(models: DemoModels, tmp_path: Path):
    with_example = run(models, tmp_path / "example.log", installed(tmp_path))
    without = run(models, tmp_path / "own.log")
    said: dict[str, Any] = {}
    for name, child in (("example", with_example), ("own", without)):
        out, _ = child.communicate(timeout=600)
        assert child.returncode == 0, (tmp_path / f"{name}.log").read_text()[-4000:]
        said[name] = json.loads(out.splitlines()[-1])
    assert said["example"]["backends"] == ["PagedRowsBackend"]
    assert said["own"]["backends"] == ["CPUAttentionBackend"]
    assert {each["scheduler"] for each in said.values()} == {"AsyncScheduler"}
    assert said["example"]["tokens"] == said["own"]["tokens"]
    assert all(len(tokens) == 48 for tokens in said["own"]["tokens"])
