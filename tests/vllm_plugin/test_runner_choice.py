"""The runner that the user asks the plugin for."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_async_spec.vllm_plugin import runner_choice, scheduling
from vllm_async_spec.vllm_plugin.runner_choice import (
    VARIABLE,
    alternative,
    created,
    runner_of,
    settle_inquiry,
    take,
    why,
)
from vllm_async_spec.vllm_plugin.settings import RUNNER, Runner, SettingError, Settings
from vllm_async_spec.vllm_plugin.state import Plugin
from vllm_async_spec.vllm_plugin.strict import StrictError


def plugin(**environment: str) -> Plugin:
    return Plugin(Settings.read(environment))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    made = plugin(VLLM_ASYNC_SPEC_RUNNER="v2")
    monkeypatch.setenv(RUNNER, "v2")
    monkeypatch.setenv(VARIABLE, "1")
    made.chose_runner = True
    monkeypatch.setattr(runner_choice, "active_plugin", lambda: made)
    return made


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(runner_choice.logger, "warning", lambda message, *values: found.append(message % values))
    return found


def refusing_v2() -> Any:
    if os.environ.get(VARIABLE) == "1":
        raise ValueError("Model Runner V2 does not yet support: ngram.")
    return "V1's configuration"


def test_the_setting_has_three_values():
    assert Settings.read({}).runner is Runner.AUTO
    chosen = Settings.read({RUNNER: "v2"})
    assert (chosen.runner, chosen.runner_from) == (Runner.V2, "environment")
    with pytest.raises(SettingError, match="VLLM_ASYNC_SPEC_RUNNER is 'V3'; it must be one of auto, v1, v2"):
        Settings.read({RUNNER: "V3"})


@pytest.fixture
def both_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_choice, "_exists", lambda choice: True)


DIFFER = "VLLM_ASYNC_SPEC_RUNNER is 'v2', but VLLM_USE_V2_MODEL_RUNNER is '0'; unset one of the two"


@pytest.mark.usefixtures("both_exist")
@pytest.mark.parametrize(
    ("choice", "before", "after", "chose", "said"),
    [
        ("auto", {}, {}, False, None),
        ("v1", {}, {VARIABLE: "0"}, True, None),
        ("v2", {}, {VARIABLE: "1"}, True, None),
        ("v2", {VARIABLE: "1"}, {VARIABLE: "1"}, False, None),
        ("v2", {VARIABLE: "0"}, {VARIABLE: "0"}, False, DIFFER),
    ],
)
def test_vllms_variable_is_set_to_what_was_asked_for_unless_the_user_has_set_it(choice, before, after, chose, said):
    made, environment = plugin(VLLM_ASYNC_SPEC_RUNNER=choice), dict(before)
    assert take(made, environment) == said
    assert (environment, made.chose_runner) == (after, chose)


@pytest.mark.parametrize(("choice", "there"), [("v2", "gpu_model_runner.py"), ("v1", "gpu/model_runner.py")])
def test_a_release_without_the_runner_is_named(monkeypatch, tmp_path, choice, there):
    file = tmp_path / "v1" / "worker" / there
    file.parent.mkdir(parents=True)
    file.touch()
    vllm = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(runner_choice.importlib.util, "find_spec", lambda name: vllm)
    environment = dict[str, str]()
    found = take(plugin(VLLM_ASYNC_SPEC_RUNNER=choice), environment)
    assert found == (
        f"VLLM_ASYNC_SPEC_RUNNER is '{choice}', but this vLLM has no {choice.upper()} runner; "
        "unset VLLM_ASYNC_SPEC_RUNNER"
    )
    assert environment == {}


REFUSED = (
    "VLLM_ASYNC_SPEC_RUNNER is 'v2', but vLLM refuses it for this engine "
    "(Model Runner V2 does not yet support: ngram); unset VLLM_ASYNC_SPEC_RUNNER"
)


def test_what_vllm_refuses_is_left_to_vllm_in_every_process(asked, lines):
    assert created(refusing_v2) == "V1's configuration"
    assert lines == [f"vllm-async-spec: vLLM chooses the runner: {REFUSED}"]
    assert (os.environ[RUNNER], VARIABLE in os.environ, asked.chose_runner) == ("auto", False, False)
    assert created(refusing_v2) == "V1's configuration"
    assert len(lines) == 1


def test_what_vllm_refuses_ends_a_strict_start(asked, monkeypatch):
    strict = Settings.read({RUNNER: "v2", "VLLM_ASYNC_SPEC": "strict"})
    monkeypatch.setattr(asked, "settings", strict)
    with pytest.raises(StrictError, match=r"refuses it .* or set VLLM_ASYNC_SPEC=auto to leave the runner to vLLM"):
        created(refusing_v2)
    assert (os.environ[RUNNER], os.environ[VARIABLE]) == ("v2", "1")


def test_arguments_that_vllm_refuses_with_any_runner_keep_the_choice(asked, lines):
    def refusing() -> Any:
        raise ValueError(f"no such model, with {os.environ.get(VARIABLE)}")

    with pytest.raises(ValueError, match="no such model, with 1"):
        created(refusing)
    assert (os.environ[VARIABLE], asked.chose_runner, lines) == ("1", True, [])


def test_an_inquiry_logs_nothing_and_leaves_the_environment(asked, lines):
    with scheduling._asking():
        assert created(refusing_v2) == "V1's configuration"
    assert (os.environ[RUNNER], os.environ[VARIABLE], lines) == ("v2", "1", [])
    assert asked.runner_refused == REFUSED
    settle_inquiry(asked)
    assert (VARIABLE in os.environ, asked.chose_runner) == (False, False)


def test_the_users_own_variable_is_not_undone(asked):
    asked.chose_runner = False
    with pytest.raises(ValueError, match="does not yet support"):
        created(refusing_v2)
    assert os.environ[VARIABLE] == "1"


def config(v2: bool = False, default: bool = False, unsupported: tuple[str, ...] = (), hybrid: bool = False) -> Any:
    return SimpleNamespace(
        speculative_config=object(),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        use_v2_model_runner=v2,
        _is_default_v2_model_runner_model=lambda: default,
        _get_v2_model_runner_unsupported_features=lambda: list(unsupported),
    )


@pytest.fixture
def triton(both_exist, monkeypatch) -> SimpleNamespace:
    """What vLLM says of Triton, where the user has chosen no runner."""
    made = SimpleNamespace(HAS_TRITON=True)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(runner_choice.importlib, "import_module", {"vllm.triton_utils": made}.__getitem__)
    return made


@pytest.mark.parametrize(
    ("found", "reason", "offered"),
    [
        (config(), "vLLM's default for this model", True),
        (config(unsupported=("ngram",)), "vLLM's default for this model", False),
        (config(default=True, unsupported=("ngram", "dbo")), "vLLM's V2 runner does not support ngram, dbo", False),
        (config(v2=True, default=True), "vLLM's default for this engine", False),
    ],
)
def test_v2_is_offered_where_vllm_chose_v1_and_names_nothing_unsupported(triton, monkeypatch, found, reason, offered):
    assert why(found, plugin()) == reason
    sentence = "vLLM's V2 runner supports this engine too; to try V2, set VLLM_ASYNC_SPEC_RUNNER=v2"
    assert alternative(found, plugin()) == (sentence if offered else None)
    off = alternative(found, plugin(VLLM_ASYNC_SPEC="off"))
    assert off == (sentence.replace("VLLM_ASYNC_SPEC_RUNNER=v2", "VLLM_USE_V2_MODEL_RUNNER=1") if offered else None)
    triton.HAS_TRITON = False
    assert alternative(found, plugin()) is None
    monkeypatch.setenv(VARIABLE, "0")
    assert (why(found, plugin()), alternative(found, plugin())) == ("VLLM_USE_V2_MODEL_RUNNER is 0", None)


@pytest.mark.usefixtures("triton")
def test_v2_is_not_offered_to_a_drafting_hybrid_where_it_decodes_by_shape(monkeypatch):
    source = "def get_uniform_token_count(num_reqs, num_tokens, max_query_len):"
    monkeypatch.setattr(runner_choice, "_source", lambda file: source)
    hybrid = config(hybrid=True)
    assert alternative(config(), plugin()) is not None
    assert alternative(hybrid, plugin()) is None
    source = source.replace("uniform_token", "uniform_decode_token")
    assert alternative(hybrid, plugin()) is not None
    source, hybrid.speculative_config = "", None
    assert alternative(hybrid, plugin()) is not None


@pytest.mark.usefixtures("both_exist")
def test_the_release_that_has_only_a_message_is_asked_too(monkeypatch):
    def validate() -> None:
        raise ValueError("VLLM_USE_V2_MODEL_RUNNER does not yet support: hybrid/mamba models")

    monkeypatch.delenv(VARIABLE, raising=False)
    envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)
    monkeypatch.setattr(runner_choice.importlib, "import_module", {"vllm.envs": envs}.__getitem__)
    old: Any = SimpleNamespace(_validate_v2_model_runner=validate, speculative_config=None)
    assert (runner_of(old), why(old, plugin())) == ("V1", "vLLM's default in this release")
    assert alternative(old, plugin()) is None
    assert runner_choice._unsupported(old) == ["hybrid/mamba models"]
    old._validate_v2_model_runner = lambda: None
    assert alternative(old, plugin()) is not None
    del old._validate_v2_model_runner
    assert alternative(old, plugin()) is None


CODE = """
    import multiprocessing, os
    from vllm_async_spec.vllm_plugin.plugin import load

    def work():
        plugin = load()
        print(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"), plugin.chose_runner, plugin.runner_refused)

    if __name__ == "__main__":
        work()
        child = multiprocessing.get_context("spawn").Process(target=work)
        child.start()
        child.join()
"""


def in_two_processes(folder: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    file = folder / "start.py"
    file.write_text(textwrap.dedent(CODE))
    kept = {name: value for name, value in os.environ.items() if name not in (VARIABLE, RUNNER)}
    return subprocess.run([sys.executable, "-u", str(file)], capture_output=True, text=True, env=kept | environment)


def test_a_spawned_worker_takes_the_same_runner(tmp_path):
    pytest.importorskip("vllm", reason="its runners are looked for")
    done = in_two_processes(tmp_path, VLLM_ASYNC_SPEC_RUNNER="v2")
    assert done.stdout.splitlines() == ["1 True None", "1 False None"], done.stderr


def test_off_takes_no_runner(tmp_path):
    done = in_two_processes(tmp_path, VLLM_ASYNC_SPEC_RUNNER="v2", VLLM_ASYNC_SPEC="off")
    assert done.stdout.splitlines() == ["None False None"] * 2, done.stderr


def test_a_choice_that_cant_be_taken_is_one_line_of_the_log_and_ends_a_strict_start(tmp_path):
    pytest.importorskip("vllm", reason="its runners are looked for")
    environment = {"VLLM_ASYNC_SPEC_RUNNER": "v2", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    done = in_two_processes(tmp_path, **environment)
    assert done.stderr.count(f"vLLM chooses the runner: {DIFFER}") == 1
    done = in_two_processes(tmp_path, **environment, VLLM_ASYNC_SPEC="strict")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"vllm-async-spec: {DIFFER}, or set VLLM_ASYNC_SPEC=auto to leave the runner to vLLM\n"
