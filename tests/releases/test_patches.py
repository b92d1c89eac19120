"""The patches on a real vLLM release: which are applied, and that its metadata then behaves as ours does."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types

import fake_flashinfer
import pytest
import torch
from undone import undone

from vllm_async_spec import HostSyncError, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.attention import FlashAttentionAdapter, HostNeed
from vllm_async_spec.compat import builders
from vllm_async_spec.vllm_plugin.audit_agent import agent as audit_agent
from vllm_async_spec.vllm_plugin.ledger import Ledger, Match, State, ledger_directory, load_ledger, verify
from vllm_async_spec.vllm_plugin.ledger.entries import read_lock
from vllm_async_spec.vllm_plugin.ledger.verify import updated_lock
from vllm_async_spec.vllm_plugin.patches.async_scheduling import explain
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

QUERY, SEQ = [1, 4, 7], [33, 100, 7]
COMPUTED = [32, 96, 0]


@pytest.fixture(scope="module")
def ledger():
    """The ledger, settled; everything is put back after this module."""
    fake_flashinfer.install()
    ledger = Ledger(IMPLEMENTATIONS | audit_agent.IMPLEMENTATIONS, load_ledger())
    for outcome in ledger.outcomes.values():
        for module in outcome.modules:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                assert module not in sys.modules
    with undone():
        ledger.install()
        yield ledger


@pytest.fixture
def metadata(ledger):
    """What the runner builds, with no host lengths."""
    reset_sync_report()
    made = builders.common_metadata(QUERY, SEQ)
    made.seq_lens_cpu = made.num_computed_tokens_cpu = None
    if hasattr(made, "seq_lens_cpu_upper_bound"):
        made.seq_lens_cpu_upper_bound = made.seq_lens_cpu_upper_bound + 3
    return made


@pytest.mark.parametrize("spec", load_ledger(), ids=lambda spec: spec.name)
def test_a_patch_is_applied_exactly_where_its_ledger_entry_says(ledger, release, spec):
    """Fails when a patch has become unnecessary for a release that its entry names, or needed for one it does not."""
    outcome = ledger.outcomes[spec.name]
    if spec.name == "async-scheduling-cpu":
        assert (outcome.state, outcome.detail) == (State.NOT_NEEDED, "the platform is not the CPU")
    elif release in spec.releases:
        assert outcome.state is State.APPLIED, outcome.detail
        assert outcome.release is not None
    else:
        assert outcome.state is State.NOT_NEEDED, outcome.detail


def test_the_source_verifies(vllm_source, release):
    for verdict in verify(load_ledger(), vllm_source):
        expected = Match.SAME if release in _spec(verdict.patch).releases else Match.NOT_NEEDED
        assert verdict.match is expected, verdict


def test_the_lock_file_has_what_an_update_from_this_source_writes(vllm_source):
    lock = read_lock(ledger_directory())
    assert updated_lock(load_ledger(), lock, vllm_source) == lock


def test_installing_again_changes_nothing(ledger):
    cls = builders.common_metadata_class()
    before = dict(vars(cls))
    ledger.install()
    assert dict(vars(cls)) == before


def test_unknown_lengths_are_copied_at_the_callers_line(metadata):
    assert metadata._seq_lens_cpu is None
    assert metadata.num_computed_tokens_cpu.tolist() == COMPUTED
    assert metadata.seq_lens_cpu.tolist() == SEQ
    assert {(site.what, site.count, site.site.file) for site in sync_report().sites} == {
        ("num_computed_tokens", 1, __file__),
        ("seq_lens", 1, __file__),
    }
    assert metadata.num_computed_tokens.tolist() == COMPUTED
    assert metadata.seq_len_upper_bound == metadata.max_seq_len
    with sync_policy("error"), pytest.raises(HostSyncError):
        builders.common_metadata(QUERY, SEQ, **_no_host(metadata)).seq_lens_cpu  # noqa: B018


def test_unpadded_replace_and_micro_batches_never_sync(metadata):
    ubatch_slice = builders.ubatch_function("UBatchSlice")
    cut = builders.ubatch_function("_make_metadata_with_slice")
    with sync_policy("error"):
        unpadded = metadata.unpadded(5, 2)
        replaced = dataclasses.replace(metadata, max_query_len=9)
        parts = [
            cut(ubatch_slice(slice(0, 2), slice(0, 3)), metadata),
            cut(ubatch_slice(slice(1, 3), slice(3, 12)), metadata),
        ]
    assert replaced.seq_lens is metadata.seq_lens
    bound = getattr(metadata, "seq_lens_cpu_upper_bound", None)
    if bound is not None:
        assert unpadded.seq_lens_cpu_upper_bound.tolist() == bound[:2].tolist()
    assert unpadded.seq_lens_cpu.tolist() == SEQ[:2]
    assert unpadded.num_computed_tokens_cpu.tolist() == COMPUTED[:2]
    assert [part.seq_lens_cpu.tolist() for part in parts] == [[33, 98], [100, 7]]
    assert all(part.max_seq_len >= max(part.seq_lens.tolist()) for part in parts)


@pytest.mark.parametrize(
    ("query", "seq"), [([1, 1, 1], SEQ), ([4, 4, 4], [36, 100, 10]), (QUERY, SEQ)], ids=["decode", "spec", "mixed"]
)
def test_flash_attention_needs_device_lengths_only(ledger, loaded, query, seq):
    """vLLM's builder runs with host lengths absent, and hands its kernels what our adapter does."""
    builder = builders.flash_attention_builder(spec_tokens=3)
    metadata = builders.common_metadata(query, seq)
    metadata.seq_lens_cpu = metadata.num_computed_tokens_cpu = None
    with sync_policy("error"):
        built = builder.build(common_prefix_len=0, common_attn_metadata=metadata)
        adapter = FlashAttentionAdapter()
        arguments = adapter.arguments(metadata)
    assert adapter.host_need is HostNeed.NONE
    assert torch.equal(arguments.cu_seqlens_q, built.query_start_loc)
    assert torch.equal(arguments.seqused_k, built.seq_lens)
    assert torch.equal(arguments.block_table, built.block_table)
    assert (arguments.max_seqlen_q, arguments.max_seqlen_k) == (built.max_query_len, built.max_seq_len)
    assert arguments.causal == built.causal


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


def test_a_method_that_async_scheduling_cannot_run_gives_vllms_reason(ledger, tiny_model_dir, tmp_path):
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


def _spec(name):
    return next(spec for spec in load_ledger() if spec.name == name)


def _release_fields():
    """The names that this release's own constructor has."""
    return inspect.signature(inspect.unwrap(builders.common_metadata_class().__init__)).parameters


def _no_host(metadata):
    return {name: None for name in ("seq_lens_cpu", "num_computed_tokens_cpu") if name in _release_fields()}


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
