"""Steps of the optimistic runner that need exact counts: who needs them, and that each waits once and says why."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
from bare_runner import (
    DRAFTS,
    group,
    made_by,
    make_input_batch,
    prepare,
    runner,
    runner_class,
    sample,
    schedule,
    settings,
    upstream,
)

from vllm_async_spec import sync_report
from vllm_async_spec.compat.backends import backend_subject
from vllm_async_spec.compat.builder_inputs import AbsentError
from vllm_async_spec.compat.cases import CASES, Host
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.vllm_plugin.patches.exact_counts import DEVICE_LENGTHS, always_needed, needed_by

__all__ = ["runner", "runner_class", "upstream"]  # fixtures


@pytest.mark.parametrize("processed", [False, True], ids=["in flight", "already processed"])
def test_an_exact_step_waits_once_and_puts_the_host_right(runner, monkeypatch, processed):
    """Whether or not the engine has seen the result of the step, vLLM's arithmetic comes to the exact number."""
    prepare(runner, ["a"], [28], [4], [3])
    sample(runner, [1], monkeypatch)  # an optimistic step: of its three drafts none is accepted
    runner.input_batch.no_penalties = False
    prepare(runner, ["a"], [32], [4], [3])  # 29 on the device
    sample(runner, [3], monkeypatch)  # 32 now
    # Ten outputs were known before both steps. Of the first step four placeholders are left where one token was given.
    request = SimpleNamespace(prev_num_draft_len=DRAFTS, output_token_ids=[*range(10), -1, -1, -1, -1, -1])
    runner.requests["a"] = request
    batch = runner.input_batch
    batch.num_prompt_tokens[0], batch.num_tokens_no_spec[0] = 20, 20 + 15  # as the optimistic step has left it
    schedule(runner, a=(32, 14) if processed else (33, 15))
    (count,) = runner._get_valid_sampled_token_count()
    assert runner.valid_sampled_token_count_event.waits == 1
    assert sync_report().fallbacks == {"penalties": 1}
    assert [(site.what, site.kind.value, site.count) for site in sync_report().sites] == [
        ("accepted counts", "event", 1)
    ]
    # What follows is `_update_states`.
    computed, outputs = (32, 14) if processed else (33, 15)
    request.output_token_ids.extend([-1] * (count - 1))
    del request.output_token_ids[outputs:]
    assert computed - (DRAFTS - (count - 1)) == 32
    assert request.output_token_ids == [*range(10), -1, -1, -1, -1]
    assert batch.num_tokens_no_spec[0] == 20 + 12, "without the two that are accepted, which vLLM never adds here"


def test_after_an_exact_step_the_next_is_optimistic_again(runner, monkeypatch):
    runner.input_batch.bad_words_token_ids = {0: [[1]]}
    prepare(runner, ["a"], [32], [4], [3])
    sample(runner, [2], monkeypatch)
    assert runner.valid_sampled_token_count_cpu[0] == 2
    runner.input_batch.bad_words_token_ids = {}
    prepare(runner, ["a"], [34], [4], [3])
    sample(runner, [4], monkeypatch)
    assert runner._get_valid_sampled_token_count() == [4]
    assert runner.valid_sampled_token_count_event.waits == 0
    prepare(runner, ["a"], [38], [4], [3])
    assert runner.seq_lens.gpu[0] == 42


def test_a_batch_without_drafts_is_not_waited_for(runner, monkeypatch):
    runner.input_batch.no_penalties = False
    prepare(runner, ["a"], [0], [32], [0])
    sample(runner, [1], monkeypatch)
    assert runner._get_valid_sampled_token_count() == [1]
    assert runner.valid_sampled_token_count_event.waits == 0


def test_a_runner_that_is_always_exact_waits_as_vllm_does_and_says_why(runner, monkeypatch):
    runner._progress, runner._always_exact = None, "attention backend FLASHINFER"
    sample(runner, [2], monkeypatch)
    assert runner._get_valid_sampled_token_count() == [2]
    assert runner.valid_sampled_token_count_event.waits == 1
    assert sync_report().fallbacks == {"attention backend FLASHINFER": 1}


def test_without_asynchronous_scheduling_nothing_is_counted(runner):
    runner.valid_sampled_token_count_event = None
    assert runner._get_valid_sampled_token_count() == []
    assert (sync_report().count, sync_report().fallbacks) == (0, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"attn_groups": [[group("TRITON_ATTN"), group("FLASH_ATTN", "SlidingWindowSpec")]]}, None),
        ({"attn_groups": [[group(), group("FLASHINFER")]]}, "attention backend FLASHINFER"),
        (
            {"attn_groups": [[group(spec="ChunkedLocalAttentionSpec")]]},
            "attention backend FLASH_ATTN with ChunkedLocalAttentionSpec",
        ),
        (
            {
                "attn_groups": [
                    [group(spec="ChunkedLocalAttentionSpec", builder=made_by("vllm.x", cuts_on_device=True))]
                ]
            },
            None,
        ),
        (
            {"attn_groups": [[group(), group(builder=made_by("a_plugin.backend"))]]},
            "attention backend FLASH_ATTN with a_plugin.backend.Builder",
        ),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"model_config": SimpleNamespace(is_hybrid=True)}, "hybrid model"),
        ({"speculative_config": SimpleNamespace(use_ngram_gpu=lambda: True)}, "n-gram drafts on the GPU"),
        ({"is_multimodal_pruning_enabled": True}, "multimodal pruning"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"drafter": SimpleNamespace()}, "drafter"),
    ],
)
def test_who_always_needs_exact_counts(change, reason):
    assert always_needed(SimpleNamespace(**(settings() | change))) == reason


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "prefill_context_parallel_size", "use_ubatching"])
def test_who_always_needs_exact_counts_by_parallelism(name):
    given = settings()
    setattr(given["parallel_config"], name, 2)
    assert always_needed(SimpleNamespace(**given)) in ("pipeline parallelism", "context parallelism", "micro-batches")


def test_a_rank_of_a_pipeline_without_a_drafter_needs_exact_counts():
    given = settings()
    given["parallel_config"].pipeline_parallel_size = 2
    del given["drafter"]
    assert always_needed(SimpleNamespace(**given)) == "pipeline parallelism"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"no_penalties": False}, "penalties"),
        ({"bad_words_token_ids": {0: [[4]]}}, "bad words"),
        ({"sampling_metadata": SimpleNamespace(output_token_ids=[[1]])}, "logits processors"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace(min_toks={0: (3, [], set())})])}, "min_tokens"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace(min_toks={})])}, None),
    ],
)
def test_which_batches_need_exact_counts(change, reason):
    assert needed_by(SimpleNamespace(**(vars(make_input_batch()) | change))) == reason


def test_the_names_that_decide_are_those_of_this_release(upstream):
    """A name that a release does not have would silently make every batch optimistic, or every backend exact."""
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.worker import gpu_input_batch

    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    for name in ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs"):
        assert hasattr(interface, name)
    assert isinstance(gpu_input_batch.InputBatch.no_penalties, property)
    assert "min_toks" in MinTokensLogitsProcessor.__init__.__code__.co_names
    eagle = importlib.import_module("vllm.v1.spec_decode.eagle")
    assert "self.backup_next_token_ids" in inspect.getsource(eagle.EagleProposer.__mro__[-2].__init__)


BATCHES = ("spec K + 1", "non-uniform spec", "mixed", "page boundary", "draft step 2", "draft step 3")


@pytest.fixture(scope="module")
def simulated(loaded):
    device = SimulatedDevice()
    loaded.on_kernel = device.kernel_did_not_run
    yield device
    loaded.on_kernel = None


@pytest.mark.parametrize("name", [*sorted(DEVICE_LENGTHS), "FLASHINFER"])
def test_a_backend_that_is_named_builds_the_same_from_a_bound_and_drafts_without_a_wait(upstream, simulated, name):
    """Told a bound in place of exact lengths, and nothing in draft steps. FlashInfer's fails."""
    try:
        result = check(backend_subject(name, simulated), simulated, cases=[c for c in CASES if c.name in BATCHES])
    except AbsentError as error:
        pytest.skip(str(error))
    if result.failure is not None:
        pytest.skip(f"{name} can't be made here: {result.failure}")
    ran = [case for case in result.cases if case.not_run is None]
    right = all(not case.build(Host.BOUND).wrong and case.build(Host.BOUND).failure is None for case in ran)
    drafting = [case for case in ran if case.case.startswith("draft step")]
    waits = [wait for case in drafting for wait in case.build(Host.ABSENT).waits]
    assert len(drafting) == 2
    if name == "FLASHINFER":
        assert waits
    else:
        assert (right, waits) == (True, [])
