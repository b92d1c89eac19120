"""Steps of the optimistic runner that need exact counts."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
from bare_runner import (
    group,
    made_by,
    make_input_batch,
    runner,
    runner_class,
    sample,
    settings,
    upstream,
)

from vllm_async_spec import sync_report
from vllm_async_spec.compat.backends import backend_subject
from vllm_async_spec.compat.builder_inputs import AbsentError
from vllm_async_spec.compat.cases import CASES, Host
from vllm_async_spec.compat.check import check
from vllm_async_spec.vllm_plugin.patches.exact_counts import DEVICE_LENGTHS, always_needed, needed_by

__all__ = ["runner", "runner_class", "upstream"]  # fixtures


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


def groups(*each):
    return {"attn_groups": [each]}


CHUNKED = "ChunkedLocalAttentionSpec"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (groups(group("TRITON_ATTN"), group("FLASH_ATTN", "SlidingWindowSpec")), None),
        (groups(group(), group("FLASHINFER")), "attention backend FLASHINFER"),
        (groups(group(spec=CHUNKED)), "attention backend FLASH_ATTN with ChunkedLocalAttentionSpec"),
        (groups(group(spec=CHUNKED, builder=made_by("vllm.x", cuts_on_device=True))), None),
        (
            groups(group(), group(builder=made_by("a_plugin.backend"))),
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


@pytest.mark.parametrize(
    ("name", "lacks", "reason"),
    [
        ("pipeline_parallel_size", None, "pipeline parallelism"),
        ("pipeline_parallel_size", "drafter", "pipeline parallelism"),
        ("prefill_context_parallel_size", None, "context parallelism"),
        ("use_ubatching", None, "micro-batches"),
    ],
)
def test_who_always_needs_exact_counts_by_parallelism(name, lacks, reason):
    given = settings()
    setattr(given["parallel_config"], name, 2)
    given.pop(lacks, None)
    assert always_needed(SimpleNamespace(**given)) == reason


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


@pytest.mark.parametrize("name", [*sorted(DEVICE_LENGTHS), "FLASHINFER"])
def test_a_backend_that_is_named_builds_the_same_from_a_bound_and_drafts_without_a_wait(upstream, device, name):
    """Told a bound in place of exact lengths, and nothing in draft steps. FlashInfer's fails."""
    try:
        result = check(backend_subject(name, device), device, cases=[c for c in CASES if c.name in BATCHES])
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
