"""The patches of asynchronous scheduling on a real vLLM release: who decides, and what the user said."""

from __future__ import annotations

import types

import pytest
from applied import ledger

from vllm_async_spec.compat import builders
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.patches.async_scheduling import explain

__all__ = ["ledger"]  # a fixture


@pytest.mark.parametrize("choice", [None, True, False])
@pytest.mark.parametrize("method", [None, "eagle", "draft_model"])
def test_asynchronous_scheduling_is_on_unless_the_user_chose(ledger, method, choice, tiny_model_dir, tmp_path):
    args = _engine_args(method, choice, tiny_model_dir, tmp_path)
    config, decision = explain(args)
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


def test_a_method_that_async_scheduling_cannot_run_gives_vllms_reason(ledger, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # from 0.33 on the V2 runner can
    args = _engine_args("ngram", None, tiny_model_dir, tmp_path)
    config, decision = explain(args)
    assert config.scheduler_config.async_scheduling is False
    assert (decision.enabled, decision.by) == (False, "vLLM")
    if ledger.outcomes["async-scheduling-default"].state is State.APPLIED:
        assert "async scheduling is only supported with EAGLE" in decision.why
    assert "\n" not in str(decision)


@pytest.mark.parametrize(
    ("flags", "given"), [([], None), (["--async-scheduling"], True), (["--no-async-scheduling"], False)]
)
def test_the_command_line_tells_unset_from_no(ledger, flags, given):
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args([*flags, "--model", "m"]))
    assert args.async_scheduling is given


@pytest.mark.parametrize("given", [{}, {"async_scheduling": False}, {"async_scheduling": True}])
def test_the_first_engine_arguments_of_a_process_tell_unset_from_no(ledger, release, given):
    """They load the plugin from within their own constructor; where vllm.LLM makes them, its keywords tell."""
    if ledger.outcomes["async-scheduling-unset"].state is State.NOT_NEEDED:
        pytest.skip("an option that was not given is None in this release")
    from vllm.engine.arg_utils import EngineArgs

    from vllm_async_spec.vllm_plugin.patches import async_scheduling

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


def _engine_args(method, choice, model, tmp_path):
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    if method == "draft_model" and not hasattr(SpeculativeConfig, "uses_draft_model"):
        pytest.skip("this release has no draft models in its V1 engine")
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        drafts["prompt_lookup_max"] = 3
    elif method is not None:
        architecture = "EagleLlamaForCausalLM" if method == "eagle" else "LlamaForCausalLM"
        drafts["model"] = str(builders.write_llama(tmp_path, num_layers=1, architecture=architecture))
    chosen = {} if choice is None else {"async_scheduling": choice}
    return EngineArgs(model=str(model), max_model_len=256, speculative_config=drafts if method else None, **chosen)
