"""The process of an engine."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.arms import Arm, Plugin
from benchmarks.child import ChildError, environment, interpreter, start
from benchmarks.facts import EngineError, choose_plugins, load_plugins

ARM = Arm("an arm", "tiny")
TP2 = {"tensor_parallel_size": 2}


def fake_python(folder: Path, script: str) -> Path:
    path = folder / "python-fake"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def ask_one(folder: Path, script: str) -> None:
    env = fake_python(folder, script)
    with start(ARM, (), audit=False, env=env, models=folder, log=folder / "log") as engine:
        engine.wait_until_ready()
        engine.ask("describe")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "echo 'RuntimeError: no memory' >&2; echo bye >&2; exit 3",
            "the process ended with exit code 3: RuntimeError: no memory",
        ),
        ("echo bye >&2; exit 1", "the process ended with exit code 1: bye"),
        ("exit 1", "the process ended with exit code 1: the log is empty"),
        ("""echo '{"error": "ValueError: no such backend"}'""", "ValueError: no such backend"),
        (
            """echo '{"ready": true}'; read line; echo 'Killed' >&2; exit 9""",
            "the process ended with exit code 9: Killed",
        ),
    ],
)
def test_a_death_is_one_sentence_with_the_logs_path(tmp_path: Path, script: str, sentence: str):
    with pytest.raises(ChildError) as died:
        ask_one(tmp_path, script)
    assert str(died.value) == f"the engine of 'an arm' failed: {sentence} (log: {tmp_path / 'log'})"


def test_nothing_of_the_callers_settings_reaches_an_arm():
    inherited = {"PATH": "/bin", "VLLM_ASYNC_SPEC": "strict", "VLLM_ATTENTION_BACKEND": "OURS"}
    stock = environment(ARM, inherited)
    assert stock["PATH"] == "/bin"
    assert not {"VLLM_ASYNC_SPEC", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V2_MODEL_RUNNER"} & stock.keys()
    plugin = environment(Arm("b", "tiny", plugin=Plugin.ON, runner="V1", environment={"A": "1"}), inherited, audit=True)
    assert plugin["VLLM_ASYNC_SPEC"] == "auto"
    assert (plugin["VLLM_USE_V2_MODEL_RUNNER"], plugin["VLLM_ASYNC_SPEC_AUDIT"], plugin["A"]) == ("0", "1", "1")
    assert environment(Arm("c", "tiny", plugin=Plugin.NOOP), {})["VLLM_ASYNC_SPEC"] == "off"


def test_a_shell_file_is_sourced_before_python(tmp_path: Path):
    env = tmp_path / "env.sh"
    env.write_text("export FROM_ENV=yes\n")
    shown = subprocess.run(
        [*interpreter(env), "-c", "import os, sys; print(os.environ['FROM_ENV'], sys.argv[1])", "an argument"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "yes an argument\n"


def test_stock_is_vllm_with_all_plugins_but_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_PLUGINS", "anything")
    monkeypatch.setattr("benchmarks.facts.vllm_plugins", lambda: {"async_spec", "b", "a"})
    choose_plugins("stock")
    assert os.environ["VLLM_PLUGINS"] == "a,b"


@pytest.mark.parametrize(("plugin", "engine", "kept"), [("stock", {}, False), ("stock", TP2, True), ("noop", {}, True)])
def test_stock_of_one_rank_has_the_variables_of_other_arms(
    monkeypatch: pytest.MonkeyPatch, plugin: str, engine: dict[str, int], kept: bool
):
    loaded: list[str] = []
    monkeypatch.setenv("VLLM_PLUGINS", "a,b")
    plugins = SimpleNamespace(load_general_plugins=lambda: loaded.append(os.environ["VLLM_PLUGINS"]))
    monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)
    load_plugins({"plugin": plugin, "engine": engine})
    assert ("VLLM_PLUGINS" in os.environ) is kept
    assert loaded == ([] if kept else ["a,b"])


def test_an_environment_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.facts.vllm_plugins", lambda: {"a"})
    with pytest.raises(EngineError, match=r"vllm-async-spec is not installed for .*; run `pip install --no-deps"):
        choose_plugins("noop")
