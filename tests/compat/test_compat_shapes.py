"""The numbers of real models, and batches on both sides of a builder's own thresholds; no vLLM."""

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import compat_planted as planted
import pytest
import torch
from compat_checked import NAMED, report, subject

from vllm_async_spec.compat import builder_inputs
from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.builder_inputs import MAX_BATCHED_TOKENS
from vllm_async_spec.compat.cases import CASES, Host
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.model_shapes import (
    MODELS,
    MODELS_OF,
    THIRD_PARTY,
    TINY,
    UnknownModelError,
    models_named,
    why_not_for,
)
from vllm_async_spec.compat.results import BackendResult, Need
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.thresholds import does_not_fit, threshold_cases


def test_each_builder_has_models_and_each_model_a_builder():
    assert list(MODELS_OF) == list(BACKENDS)
    assert {name for names in MODELS_OF.values() for name in names} == MODELS.keys() - {TINY.name}
    assert set(THIRD_PARTY) <= MODELS.keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_builder_is_for_the_models_that_use_it(backend: str):
    assert all(why_not_for(backend, MODELS[name]) is None for name in (*MODELS_OF[backend], "tiny"))


def test_latent_attention_and_the_other_kind_exclude_each_other():
    assert why_not_for("FLASH_ATTN", MODELS["deepseek-v3"]) == (
        f"has latent attention; try {', '.join(MODELS_OF['FLASH_ATTN'])}"
    )
    assert why_not_for("FLASHMLA", MODELS["llama-8b"]) == "lacks latent attention; try deepseek-v3, deepseek-v3-tp8"


def test_models_are_named_once_and_an_unknown_name_is_told():
    assert models_named(["tiny", "llama-70b", "tiny"]) == (TINY, MODELS["llama-70b"])
    with pytest.raises(UnknownModelError, match=r"^there is no model 'llama'; there are tiny, llama-8b, .*, bert-larg"):
        models_named(["llama"])


def test_a_small_threshold_is_on_both_sides_of_the_suites_own_batches():
    assert threshold_cases(SimpleNamespace(reorder_batch_threshold=4), 16) == ()
    assert threshold_cases(SimpleNamespace(reorder_batch_threshold=None), 16) == ()
    assert threshold_cases(planted.Clean(torch.device("cpu")), 16) == ()


def test_prompts_are_at_a_large_threshold_and_past_it():
    at, past, with_context = threshold_cases(SimpleNamespace(reorder_batch_threshold=512), 16)
    assert (at.query_lens[-1], past.query_lens[-1], with_context.query_lens[-1]) == (512, 513, 513)
    assert (at.seq_lens[-1], past.seq_lens[-1]) == (512, 513)
    assert with_context.seq_lens[-1] > 513
    assert all(case.prefills == 1 for case in (at, past, with_context))


@pytest.mark.parametrize(
    ("size", "block_size", "threshold"), [(65_536, 16, 1), (65_536, 16, 512), (40 * 8192, 64, 4), (5 * 8192, 64, 256)]
)
def test_contexts_exceed_a_workspace_together_and_each_its_share(size: int, block_size: int, threshold: int):
    builder = SimpleNamespace(max_prefill_buffer_size=size, reorder_batch_threshold=threshold)
    case = threshold_cases(builder, block_size)[-1]
    prompts = [(length, query) for length, query in zip(case.seq_lens, case.query_lens, strict=True)][1:]
    contexts = [length - query for length, query in prompts]
    assert case.name == "contexts past max_prefill_buffer_size"
    assert len(prompts) == case.prefills
    assert sum(contexts) > size
    assert min(contexts) > size // len(prompts)
    assert min(query for _, query in prompts) > threshold
    assert does_not_fit(case, block_size) is None
    assert sum(case.query_lens) <= MAX_BATCHED_TOKENS
    inside = [each for each in CASES if each.prefills and min(each.seq_lens) > min(each.query_lens)]
    assert any(sum(each.seq_lens) < size for each in inside)


def test_a_workspace_larger_than_the_suites_cache_is_told():
    class Large(planted.Clean):
        chunked_prefill_workspace_size = 1 << 20

    found = check(subject(Large), SimulatedDevice())
    assert [case.not_run for case in found.cases if case.not_run] == [
        "such contexts exceed the suite's KV cache of 8192 blocks"
    ]
    assert found.cases[-1].case == "contexts past chunked_prefill_workspace_size"


class WaitsPastThreshold(planted.Builder):
    """Copies lengths to the host only for prompts that are longer than its threshold, as MLA's builders do."""

    reorder_batch_threshold = 512

    def extra(self, metadata: Any) -> Any:
        if metadata.max_query_len > self.reorder_batch_threshold:
            metadata.seq_lens.cpu()
        return None


def test_a_wait_that_only_long_prompts_reach_is_found():
    found = check(subject(WaitsPastThreshold), SimulatedDevice())
    assert found.need is Need.BLOCKING
    assert list(found.faults) == ["prompt past threshold", "prompt past threshold, with context"]
    assert check(subject(WaitsPastThreshold), SimulatedDevice(), cases=CASES).passed


class ManyHeads(planted.Builder):
    def __init__(self, device: torch.device, heads: int) -> None:
        super().__init__(device)
        self.heads = heads

    def extra(self, metadata: Any) -> Any:
        if self.heads >= 64 and metadata.num_reqs == 256:
            metadata.seq_lens.cpu()
        return None


def with_models(*names: str) -> BackendResult:
    device = SimulatedDevice()
    cases = [NAMED[name] for name in ("decode", "256 requests")]
    found: BackendResult | None = None
    for model in models_named(names):
        named = replace(subject(lambda on, heads=model.heads: ManyHeads(on, heads)), model=model.name)
        part = check(named, device, cases=cases, known=found)
        found = part if found is None else found.joined(part)
    assert found is not None
    return found


def test_a_wait_with_the_heads_of_one_model_only_is_found_and_the_model_named():
    found = with_models("llama-8b", "llama-70b")
    assert (found.need, found.models) == (Need.BLOCKING, ("llama-8b", "llama-70b"))
    assert list(found.faults) == ["256 requests, llama-70b"]
    row = report(found).published.rows[0]
    assert row.models == ["llama-8b", "llama-70b"]
    assert list(row.faults.values()) == [["256 requests (llama-70b)"]]
    assert (row.ran, row.batches) == (4, 4)
    assert with_models("tiny", "llama-8b").passed


def test_what_is_true_of_all_models_does_not_name_them():
    found = with_models("llama-70b", "deepseek-v3")
    assert list(report(found).published.rows[0].faults.values()) == [["256 requests"]]
    alone = with_models("llama-70b")
    assert list(alone.faults) == ["256 requests"]


def test_a_further_model_is_built_with_less_but_finds_the_same_need():
    first, *_, second = with_models("tiny", "llama-70b").cases
    assert {build.host for build in first.builds} == set(Host)
    assert {build.host for build in second.builds} == {Host.EXACT, Host.BOUND}
    assert second.need is Need.BLOCKING


def test_a_model_without_a_builder_is_a_batch_that_did_not_run():
    found = with_models("tiny")
    refused = replace(found, failure="can't be made: no sinks", cases=(), model="gpt-oss-120b")
    joined = found.joined(refused)
    assert joined.models == ("tiny",)
    assert report(joined).published.rows[0].not_run == {"can't be made: no sinks": ["construction"]}


def test_another_machine_is_asked_anew_though_a_patch_has_wrapped_the_question(monkeypatch: pytest.MonkeyPatch):
    machine = ["sm90"]

    @functools.cache
    def original() -> str:
        return machine[0]

    @functools.cache
    def patched() -> str:
        return original()

    @functools.wraps(original)
    def asked() -> str:
        return patched()

    asked.cache_clear = patched.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.utils.flashinfer", SimpleNamespace(asked=asked))
    assert asked() == "sm90"
    machine[0] = "sm100"
    builder_inputs._forget()
    assert asked() == "sm100"


class ThresholdFails(planted.Clean):
    """Its threshold can be read `reads` times, over all that are made."""

    reads = 0

    @property
    def reorder_batch_threshold(self) -> int:
        if ThresholdFails.reads == 0:
            raise RuntimeError("no threshold yet")
        ThresholdFails.reads -= 1
        return 1


def test_a_threshold_that_can_not_be_read_is_the_builders_failure(monkeypatch: pytest.MonkeyPatch):
    found = check(subject(ThresholdFails), SimulatedDevice())
    sentence = "its thresholds can't be read: RuntimeError: no threshold yet at compat/test_compat_shapes.py:"
    assert str(found.failure).startswith(sentence)
    assert report(found).exit_code == 2
    sentence = sentence.replace("thresholds", "reorder_batch_threshold")
    for reads in range(3):  # by the suite, for the batch, for its first build, and for its second
        monkeypatch.setattr(ThresholdFails, "reads", reads)
        found = check(subject(ThresholdFails), SimulatedDevice(), cases=[NAMED["decode"]])
        assert sentence in found.explain(), reads
        assert report(found).exit_code == 1


def test_a_declaration_that_can_not_be_read_is_the_builders_failure():
    class Undeclared(planted.Clean):
        @property
        def host_need(self) -> Any:
            raise RuntimeError("no need yet")

    found = check(subject(Undeclared), SimulatedDevice(), cases=[NAMED["decode"]])
    assert "it fails: what it declares can't be read: RuntimeError: no need yet at " in found.explain()
