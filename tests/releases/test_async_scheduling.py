"""The patches of asynchronous scheduling on a real vLLM release."""

import importlib
import pickle
import re
import types
import typing

import pytest
from packaging.version import Version

from vllm_async_spec.compat import builders
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.patches import async_scheduling
from vllm_async_spec.vllm_plugin.scheduling import Stock, copied, explain, noted


@pytest.fixture
def make_args(ledger, tiny_model_dir, tmp_path):
    def make(method, choice=None, drafts=None, **given):
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.abstract import Executor

        if method == "draft_model" and not hasattr(SpeculativeConfig, "uses_draft_model"):
            pytest.skip("this release has no draft models in its V1 engine")
        if given.get("distributed_executor_backend") == "third party":
            given["distributed_executor_backend"] = type("ThirdParty", (Executor,), {})
        asked = _drafts(method, tmp_path) | (drafts or {}) if method else None
        chosen = {} if choice is None else {"async_scheduling": choice}
        args = EngineArgs(model=str(tiny_model_dir), max_model_len=256, speculative_config=asked, **chosen, **given)
        if method == "medusa":
            try:
                copied(args).create_engine_config()
            except NotImplementedError as error:
                pytest.skip(f"this release has no medusa: {error}")
        return args

    return make


def _drafts(method, folder):
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        drafts["prompt_lookup_max"] = 3
    else:
        architecture = "EagleLlamaForCausalLM" if method == "eagle" else "LlamaForCausalLM"
        drafts["model"] = str(builders.write_llama(folder / method, num_layers=1, architecture=architecture))
    return drafts


@pytest.fixture
def v1_runner(monkeypatch):
    """From 0.33 on the V2 runner takes what V1 refuses."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


@pytest.mark.parametrize("choice", [None, True, False])
@pytest.mark.parametrize("method", [None, "eagle", "draft_model"])
def test_asynchronous_scheduling_is_on_unless_the_user_chose(ledger, method, choice, make_args):
    args = make_args(method, choice)
    config, decision = explain(args)
    assert (config.speculative_config and config.speculative_config.method) == method
    enabled = config.scheduler_config.async_scheduling
    assert decision.enabled == enabled
    if choice is not None:
        assert (enabled, decision.by) == (choice, "user")
    elif method is not None:
        assert enabled
        applied = ledger.outcomes["async-scheduling-default"].state is State.APPLIED
        assert decision.by == ("vllm-async-spec" if applied else "vLLM")
    else:
        assert decision.by == "vLLM"
        # Without speculative decoding stock vLLM's own default stands: off in 0.12, on later.
        assert enabled == (type(args).async_scheduling is not False)


@pytest.mark.usefixtures("v1_runner")
def test_a_method_that_async_scheduling_cannot_run_gives_vllms_reason(make_args):
    config, decision = explain(make_args("ngram"))
    assert config.scheduler_config.async_scheduling is False
    assert (decision.enabled, decision.by) == (False, "vLLM")
    assert decision.why.startswith("vLLM refuses asynchronous scheduling with the method ngram: ")
    assert re.search(
        "async scheduling is (only supported with EAGLE|not supported by the V1)", decision.why, re.IGNORECASE
    )
    assert "\n" not in str(decision)


_ANOTHER = "choose a speculative method that vLLM schedules asynchronously, such as eagle"
CAUSES = {
    "disable_padded_drafter_batch": (
        "eagle",
        {"drafts": {"disable_padded_drafter_batch": True}},
        "leave out disable_padded_drafter_batch",
    ),
    "the executor ThirdParty": (
        "eagle",
        {"distributed_executor_backend": "third party"},
        "give --distributed-executor-backend mp",
    ),
    "pipeline parallelism": (
        None,
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        "leave out --pipeline-parallel-size",
    ),
    "pooling models": (None, {"runner": "pooling"}, "give --async-scheduling"),
    "the method ngram": ("ngram", {}, _ANOTHER),
    "the method medusa": ("medusa", {}, _ANOTHER),
}
V1_REFUSES = ("disable_padded_drafter_batch", "the method ngram")
_SPECULATIVE = "vllm.config.speculative"
V1_TAKES_PIPELINES = ("0.18.1", "0.22.1", "0.24.0", "0.26.0", "0.28.0")
ON_BY_DEFAULT = {"pipeline parallelism": (*V1_TAKES_PIPELINES, "0.32.0", "0.33.0"), "pooling models": ("0.18.1",)}
"""Releases that run these asynchronously unless the user says no."""


@pytest.mark.parametrize("cause", CAUSES)
def test_the_reason_names_the_argument_that_decides_and_its_remedy_helps(release, cause, make_args, tmp_path, request):
    method, given, remedy = CAUSES[cause]
    if method == "medusa" and "medusa" not in typing.get_args(importlib.import_module(_SPECULATIVE).SpeculativeMethod):
        pytest.skip(f"vLLM {release} has no medusa")
    if cause in V1_REFUSES:
        request.getfixturevalue("v1_runner")
    args = make_args(method, **given)
    config, decision = explain(args)
    assert decision.enabled is bool(config.scheduler_config.async_scheduling)
    if release in ON_BY_DEFAULT.get(cause, ()):
        assert (decision.enabled, decision.by, decision.remedy) == (True, "vLLM", None)
        return
    assert (decision.enabled, decision.by) == (False, "vLLM")
    if cause == "pooling models" and type(args).async_scheduling is False:
        assert decision.why == "vLLM's default is off unless the user asks for it"
    else:
        assert f"with {cause}" in decision.why
    assert decision.remedy.split(" and ")[0] == remedy
    assert _follow(args, decision.remedy, tmp_path).enabled


@pytest.mark.usefixtures("v1_runner")
def test_pipeline_parallelism_is_the_reason_in_the_v1_runner(release, make_args):
    """V1 leaves it off from about 0.30 on, and 0.12 refuses it; between, V1 takes it."""
    decision = explain(make_args(None, pipeline_parallel_size=2, distributed_executor_backend="mp"))[1]
    if not decision.enabled:
        assert "pipeline parallelism" in decision.why
        assert "--pipeline-parallel-size" in decision.remedy or decision.remedy == "give --async-scheduling"
    assert decision.enabled is (release in V1_TAKES_PIPELINES)


@pytest.mark.usefixtures("v1_runner")
@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_the_users_no_has_a_remedy_only_where_leaving_it_out_helps(method, make_args):
    decision = explain(make_args(method, False))[1]
    assert (decision.enabled, decision.by, decision.why) == (False, "user", "--no-async-scheduling was given")
    assert decision.remedy == ("leave out --no-async-scheduling" if method == "eagle" else None)


@pytest.mark.usefixtures("v1_runner")
def test_the_plugin_that_is_off_is_named_before_vllms_own_rule(make_args):
    stock = Stock("VLLM_ASYNC_SPEC is off, so vLLM runs as stock", "unset VLLM_ASYNC_SPEC")
    decision = explain(make_args("ngram"), stock=stock)[1]
    assert decision.why.startswith(f"{stock.why}: vLLM refuses asynchronous scheduling with the method ngram: ")


@pytest.mark.parametrize("method", [None, "eagle", "ngram"])
def test_a_server_says_once_who_decided_and_tells_its_other_processes(method, make_args, monkeypatch):
    lines = []
    monkeypatch.setattr(async_scheduling, "inform", lambda message, *values: lines.append(message % values))
    args = make_args(method)
    expected = explain(args)[1]
    assert lines == []
    config = args.create_engine_config()
    (line,) = lines
    # Without speculative decoding a server does not try other arguments to find the reason.
    said = line if method else line.partition(": vLLM")[0]
    assert f"vllm-async-spec: {expected}".startswith(said)
    elsewhere = types.SimpleNamespace(scheduler_config=pickle.loads(pickle.dumps(config.scheduler_config)))
    found = noted(elsewhere)
    assert (found.enabled, found.by) == (expected.enabled, expected.by)


def _follow(args, remedy, tmp_path):
    changed = copied(args)
    for step in remedy.split(" and "):
        if step == "leave out disable_padded_drafter_batch":
            changed.speculative_config.pop("disable_padded_drafter_batch")
        elif step == "give --distributed-executor-backend mp":
            changed.distributed_executor_backend = "mp"
        elif step == "leave out --pipeline-parallel-size":
            changed.pipeline_parallel_size = 1
        elif step == "give --async-scheduling":
            changed.async_scheduling = True
        else:
            assert step == _ANOTHER
            changed.speculative_config = _drafts("eagle", tmp_path / "other")
    return explain(changed)[1]


@pytest.mark.parametrize(
    ("flags", "given"), [([], None), (["--async-scheduling"], True), (["--no-async-scheduling"], False)]
)
def test_the_command_line_tells_unset_from_no(ledger, flags, given):
    assert _parsed([*flags, "--model", "m"]).async_scheduling is given


@pytest.mark.parametrize(
    ("line", "given"), [("async-scheduling: true", True), ("no-async-scheduling: true", False), ("port: 8000", None)]
)
def test_a_configuration_file_tells_unset_from_no(ledger, tmp_path, line, given):
    path = tmp_path / "engine.yaml"
    path.write_text(f"{line}\n")
    assert _parsed(["--config", str(path), "--model", "m"]).async_scheduling is given


def test_a_configuration_file_says_false_from_0_28_on(ledger, release, tmp_path):
    """Before, vLLM drops every false value of such a file; docs/settings.md says so."""
    path = tmp_path / "engine.yaml"
    path.write_text("async-scheduling: false\n")
    dropped = Version(release) < Version("0.28")
    assert _parsed(["--config", str(path), "--model", "m"]).async_scheduling is (None if dropped else False)


def _parsed(arguments):
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    if not any(action.dest == "port" for action in parser._actions):  # the server's, not the engine's
        parser.add_argument("--port")
    return AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))


@pytest.mark.parametrize("given", [{}, {"async_scheduling": False}, {"async_scheduling": True}])
def test_the_first_engine_arguments_of_a_process_tell_unset_from_no(ledger, release, given):
    """They load the plugin from within their own constructor; in vllm.LLM the keywords tell."""
    if ledger.outcomes["async-scheduling-unset"].state is State.NOT_NEEDED:
        pytest.skip("an option that was not given is None in this release")
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.__init__.__wrapped__
    made = EngineArgs.__new__(EngineArgs)

    def post_init(self):
        async_scheduling._unset_the_one_being_made(EngineArgs)

    patch = pytest.MonkeyPatch()
    patch.setattr(EngineArgs, "__post_init__", post_init)
    llm = types.ModuleType("vllm.entrypoints.llm")
    exec("def make(init, made, **kwargs):\n    init(made, model='m', **kwargs)\n", vars(llm))
    llm.make(stock, made, **given)
    patch.undo()
    assert made.async_scheduling is given.get("async_scheduling")
    with pytest.MonkeyPatch.context() as other:
        other.setattr(EngineArgs, "__post_init__", post_init)
        stock(made, model="m")
    assert made.async_scheduling is False, "anybody else's False is taken for his own"
