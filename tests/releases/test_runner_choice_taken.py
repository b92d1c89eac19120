"""The runner that the user asks the plugin for, in the configuration of a real vLLM release."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from packaging.version import Version

from vllm_async_spec.vllm_plugin import runner_choice
from vllm_async_spec.vllm_plugin.runner_choice import VARIABLE, alternative, runner_of, take, why
from vllm_async_spec.vllm_plugin.settings import RUNNER, Settings
from vllm_async_spec.vllm_plugin.state import Plugin

CHECKS = Version("0.20")
"""From here on a configuration says what V2 does not support."""
V2_BY_DEFAULT = Version("0.24")
"""From here on V2 serves a dense Llama by default."""
NGRAM_IN_V2 = Version("0.32")

Create = Callable[..., Any]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Plugin]:
    """Makes the plugin of this process, which asks for a runner; what it sets is put back."""

    def make(choice: str) -> Plugin:
        monkeypatch.setenv(RUNNER, choice)
        monkeypatch.setenv(VARIABLE, "")  # so that it is put back as it was
        monkeypatch.delenv(VARIABLE)
        made = Plugin(Settings.read({RUNNER: choice}))
        monkeypatch.setattr(runner_choice, "active_plugin", lambda: made)
        assert take(made) is None
        return made

    return make


@pytest.fixture
def create(tiny_model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> Create:
    monkeypatch.setattr(importlib.import_module("vllm.triton_utils"), "HAS_TRITON", True)
    monkeypatch.setattr(importlib.import_module("vllm.config.vllm"), "HAS_TRITON", True, raising=False)

    def make(method: str | None = None) -> Any:
        drafts = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3}
        engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        given = {} if method is None else {"speculative_config": drafts}
        return engine_args(str(tiny_model_dir), max_model_len=512, max_num_seqs=16, **given).create_engine_config()

    return make


@pytest.mark.parametrize(("choice", "runner"), [("v1", "V1"), ("v2", "V2")])
def test_the_runner_asked_for_is_in_the_configuration(ledger, plugin, create, choice, runner):
    made = plugin(choice)
    config = create()
    assert (runner_of(config), why(config, made)) == (runner, f"VLLM_ASYNC_SPEC_RUNNER is {choice}")
    assert (made.runner_refused, alternative(config, made)) == (None, None)


def test_vllms_choice_stands_and_v2_is_offered_where_v1_was_chosen(ledger, plugin, create, release):
    made = plugin("auto")
    config = create()
    by_default = Version(release) >= V2_BY_DEFAULT
    assert runner_of(config) == ("V2" if by_default else "V1")
    assert why(config, made).startswith("vLLM's default ")
    offered = not by_default and Version(release) >= CHECKS
    assert (alternative(config, made) is not None) is offered


def test_v2_decodes_by_shape_up_to_0_27(release):
    if Version(release) >= CHECKS:
        assert runner_choice._decodes_by_shape() is (Version(release) < Version("0.28.0"))


def test_what_v2_does_not_support_is_left_to_vllm(ledger, plugin, create, release, monkeypatch):
    made, lines = plugin("v2"), list[str]()
    monkeypatch.setattr(runner_choice.logger, "warning", lambda message, *values: lines.append(message % values))
    config = create("ngram")
    if Version(release) < CHECKS or Version(release) >= NGRAM_IN_V2:
        assert (runner_of(config), lines) == ("V2", [])  # the first check nothing, and the last support ngram
        return
    assert (runner_of(config), made.chose_runner) == ("V1", False)
    (line,) = lines
    assert line.startswith("vllm-async-spec: vLLM chooses the runner: VLLM_ASYNC_SPEC_RUNNER is 'v2', but vLLM refuses")
    assert "ngram" in line
    assert line.endswith("; unset VLLM_ASYNC_SPEC_RUNNER")
    assert alternative(config, made) is None
