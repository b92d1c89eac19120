"""The CI workflow of the example backend."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from vllm_async_spec.cli import app

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; vLLM and MkDocs bring it")
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "backend"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "no-host-sync.yml"
OF_THE_RUNNER = {"cat", "pip", "sudo", "uv"}
"""Commands that the runner has, or that the workflow installs."""


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def commands(workflow: dict[str, Any]) -> list[list[str]]:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    return [shlex.split(line) for step in steps if "run" in step for line in step["run"].splitlines()]


def test_it_runs_on_each_change(workflow: dict[str, Any]):
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True] == ["push", "pull_request"]
    assert all(job["runs-on"] == "ubuntu-latest" for job in workflow["jobs"].values())


def test_every_action_has_a_version(workflow: dict[str, Any]):
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in used)


def test_every_command_exists(commands: list[list[str]]):
    for program, *words in commands:
        if program == "python":
            assert words[0] == "-m"
            assert words[1] in OF_THE_RUNNER or importlib.util.find_spec(words[1]) is not None, words[1]
        elif program == "vllm-async-spec":
            group: Any = typer.main.get_command(app)
            group.commands[words[0]].make_context(words[0], words[1:])  # refuses an option that does not exist
        else:
            assert program in OF_THE_RUNNER, program


def test_it_tries_the_backend_that_the_package_names(commands: list[list[str]]):
    settings = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    (named,) = settings["tool"]["pytest"]["ini_options"]["async_spec_backends"]
    (compat,) = (words for words in commands if words[0] == "vllm-async-spec")
    assert compat[compat.index("--backend") + 1] == named
    assert ".[test]" in next(words for words in commands if words[0] == "uv")
    assert "test" in settings["project"]["optional-dependencies"]


def test_it_installs_the_vllm_of_the_extra(workflow: dict[str, Any]):
    settings = tomllib.loads((EXAMPLE.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["optional-dependencies"]["cpu"] == [workflow["env"]["VLLM"]]
    overridden = settings["tool"]["uv"]["override-dependencies"]
    example = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    assert example["tool"]["uv"]["override-dependencies"] == overridden
