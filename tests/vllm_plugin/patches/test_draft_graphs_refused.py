"""Where drafting is left as it is, and that the operator is told."""

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.patches import capture_on_ranks, draft_graphs, drafter_agreement


class FlashAttentionMetadataBuilder:
    """Of this name is vLLM's."""


class FlashInferMetadataBuilder:
    """Another of vLLM's."""


class EagleProposer(SimpleNamespace):
    """Of this name is vLLM's."""

    __hash__ = object.__hash__


class Step3p5MTPProposer(EagleProposer):
    """Another of vLLM's, which keeps metadata of several groups for each step."""


def make_runner(proposer: type[SimpleNamespace] = EagleProposer) -> Any:
    """As much of a runner as is asked, of an engine whose drafter can be captured."""
    drafter = proposer(
        num_speculative_tokens=3,
        max_num_tokens=512,
        tree_choices=[(0,), (0, 0), (0, 0, 0)],
        draft_attn_groups=[SimpleNamespace(metadata_builders=[FlashAttentionMetadataBuilder()])],
        propose=lambda token_indices_to_sample=None, **given: "launched",
    )
    return SimpleNamespace(
        drafter=drafter,
        device=torch.device("cpu"),
        use_async_scheduling=True,
        max_num_reqs=64,
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            enable_eplb=False,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=128
        ),
        speculative_config=SimpleNamespace(enforce_eager=None),
        cache_config=SimpleNamespace(calculate_kv_scales=False),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        lora_config=None,
        uses_mrope=False,
        uses_xdrope_dim=0,
    )


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.async_spec")
    monkeypatch.setattr(draft_graphs.torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(draft_graphs.torch.cuda, "memory_reserved", lambda: 0)


def no_warm_up() -> None:
    """Of a sampler that needs no memory."""


def test_nothing_speaks_against_a_plain_engine():
    runner = make_runner()
    assert draft_graphs.refused(runner) is None
    del runner.drafter.tree_choices  # as from 0.22 on
    assert draft_graphs.refused(runner) is None


def test_engines_whose_drafters_do_without_each_other_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    runner.parallel_config.data_parallel_size = 2
    monkeypatch.setitem(drafter_agreement._alone, runner.drafter, True)
    assert draft_graphs.refused(runner) is None


GROUPS = [SimpleNamespace(metadata_builders=[FlashAttentionMetadataBuilder(), FlashInferMetadataBuilder()])]
REFUSED: dict[str, list[tuple[str, Any]]] = {
    "scheduling is synchronous": [("use_async_scheduling", False)],
    "the engine captures no whole forward": [("compilation_config.cudagraph_mode.has_full_cudagraphs", lambda: False)],
    "the drafter is to run eagerly": [("speculative_config.enforce_eager", True)],
    "not all ranks are tensor-parallel": [("parallel_config.world_size", 2)],
    "the drafter asks the other engines of data parallelism": [("parallel_config.data_parallel_size", 2)],
    "ranks divide each request's KV cache": [("parallel_config.decode_context_parallel_size", 2)],
    "experts are rebalanced": [("parallel_config.enable_eplb", True)],
    "positions are XD-RoPE's": [("uses_xdrope_dim", 3)],
    "drafts are made in parallel": [("drafter.parallel_drafting", True)],
    "drafts are a tree": [("drafter.tree_choices", [(0,), (1,), (0, 0)])],
    "the drafter has another vocabulary": [("drafter.use_heterogeneous_vocab", True)],
    "drafts are drawn at random": [("drafter._enable_probabilistic_draft_probs", True)],
    "drafts are made by Step3p5MTPProposer": [("drafter", make_runner(Step3p5MTPProposer).drafter)],
    "the engine serves LoRA adapters": [("lora_config", object())],
    "keys go to another engine": [("vllm_config.kv_transfer_config", object())],
    "scales of the KV cache are computed": [("cache_config.calculate_kv_scales", True)],
    "attention metadata is built by FlashInferMetadataBuilder": [("drafter.draft_attn_groups", GROUPS)],
    "the drafter's layers are in one of several groups": [("kv_cache_config.kv_cache_groups", [None, None])],
    "graphs are smaller than the tokens of one request": [
        ("compilation_config.max_cudagraph_capture_size", 3),
        ("compilation_config.max_cudagraph_capture_size", None),
        ("drafter.max_num_tokens", 3),
    ],
}


@pytest.mark.parametrize(
    ("reason", "change"), [(reason, change) for reason, changes in REFUSED.items() for change in changes]
)
def test_it_is_left_as_it_is_and_the_operator_is_told_why(
    reason: str, change: tuple[str, Any], caplog: pytest.LogCaptureFixture
):
    path, value = change
    *owners, name = path.split(".")
    runner = make_runner()
    setattr(functools.reduce(getattr, owners, runner), name, value)
    assert draft_graphs.refused(runner) == reason
    propose = runner.drafter.propose
    draft_graphs._capture(runner, no_warm_up)
    assert runner.drafter.propose is propose
    assert caplog.messages == [f"vllm-async-spec does not capture drafting as CUDA graphs: {reason}"]


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory\nand more"), AttributeError("no such thing"), KeyError()]
)
def test_whatever_fails_leaves_vllms_own_drafting(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(runner: Any, capture: Any) -> None:
        raise error

    monkeypatch.setattr(draft_graphs, "Drafter", fail)
    runner = make_runner()
    draft_graphs._capture(runner, no_warm_up)
    assert runner.drafter.propose() == "launched"
    (line,) = caplog.messages
    assert type(error).__name__ in line
    assert "and more" not in line


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("collects", [True, False])
def test_a_drafter_that_waits_is_found_before_a_capture_and_no_garbage_is_collected_in_one(
    waits: bool, collects: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    events: list[object] = []

    def propose() -> torch.Tensor:
        events.append(gc.isenabled())
        return torch.zeros(8)

    def drafter(runner: Any, capture: Any) -> SimpleNamespace:
        return SimpleNamespace(propose=capture([propose])[0], sizes=[1], has_rest=True)

    def check(run: Callable[[], object]) -> None:
        events.append("checked")
        run()
        if waits:
            raise RuntimeError("called a synchronizing CUDA operation")

    def capture(run: Callable[[], object], pool: object) -> Callable[[], object]:
        events.append("captured")
        run()
        return run

    monkeypatch.setattr(draft_graphs, "Drafter", drafter)
    monkeypatch.setattr(capture_on_ranks, "refuse_waits", check)
    monkeypatch.setattr(capture_on_ranks, "captured", capture)
    runner = make_runner()
    launched = runner.drafter.propose
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable)
        if not collects:
            gc.disable()
        draft_graphs._capture(runner, no_warm_up)
        assert gc.isenabled() == collects
    assert events == ["checked", False, "captured", False][: 2 if waits else 4]
    assert runner.drafter.propose is (launched if waits else propose)
    assert len(caplog.records) == 1


def test_the_operator_is_told_of_the_memory_of_the_graphs_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The allocator's cache, which each capture empties, once made it 3,580 MiB less than nothing."""
    mib = SimpleNamespace(cached=3600, graphs=0)

    def drafter(runner: Any, capture: Any) -> SimpleNamespace:
        mib.cached, mib.graphs = 7, 20
        return SimpleNamespace(propose=None, sizes=[1, 8], has_rest=True)

    monkeypatch.setattr(draft_graphs, "Drafter", drafter)
    cuda = draft_graphs.torch.cuda
    monkeypatch.setattr(cuda, "empty_cache", lambda: setattr(mib, "cached", 0))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: (mib.cached + mib.graphs) << 20)
    draft_graphs._capture(make_runner(), no_warm_up)
    (line,) = caplog.messages
    assert "of 2 batch sizes up to 8" in line
    assert line.endswith(" s, 20 MiB)")


@pytest.mark.parametrize("fits", [True, False])
def test_graphs_that_leave_no_memory_for_sampling_go(
    fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """vLLM allocates the sampler's tensors at the end of its warm-up, and each capture empties the cache of them."""
    graphs: list[weakref.ref[Any]] = []

    class Drafter:
        sizes = (1,)
        has_rest = False

        def __init__(self, runner: Any, capture: Any) -> None:
            self.itself = self  # as what is captured refers to what captures it
            graphs.append(weakref.ref(self))

        def propose(self) -> str:
            return "replayed"

    def warm_up() -> None:
        warmed.append(graphs[0]() is not None)
        if warmed[-1] and not fits:
            raise RuntimeError("CUDA out of memory occurred when warming up sampler")

    warmed: list[bool] = []
    monkeypatch.setattr(draft_graphs, "Drafter", Drafter)
    runner = make_runner()
    draft_graphs._capture(runner, warm_up)
    assert runner.drafter.propose() == ("replayed" if fits else "launched")
    assert warmed == ([True] if fits else [True, False])
    (line,) = caplog.messages
    assert ("warming up sampler" in line) != fits


def test_drafting_is_captured_once_at_the_end_of_warm_up_and_the_sampler_warms_up_again(
    monkeypatch: pytest.MonkeyPatch,
):
    class Runner:
        attn_groups: tuple[str, ...] = ()

        def __init__(self) -> None:
            self.warmed: list[str] = []

        def _dummy_sampler_run(self, hidden_states: str) -> str:
            self.warmed.append(hidden_states)
            return "sampled"

    captures: list[Any] = []

    def capture(runner: Any, warm_up: Callable[[], object]) -> None:
        captures.append(runner)
        warm_up()

    monkeypatch.setattr(draft_graphs, "_capture", capture)
    with temporarily() as changes:
        draft_graphs._apply(changes, SimpleNamespace(GPUModelRunner=Runner))  # type: ignore[arg-type]
        one, two = Runner(), Runner()
        for runner in (one, two):
            assert runner._dummy_sampler_run("profile") == "sampled"  # of memory, without a KV cache
            assert captures == [one] * (runner is two)
            runner.attn_groups = ("a group",)
            assert runner._dummy_sampler_run(hidden_states="warm-up") == "sampled"
            assert runner._dummy_sampler_run("again") == "sampled"
            assert runner.warmed == ["profile", "warm-up", "warm-up", "again"]
    assert captures == [one, two]


def test_a_drafter_of_the_users_that_can_not_be_inspected_is_left_alone(caplog: pytest.LogCaptureFixture):
    runner = make_runner()
    del runner.drafter.propose
    draft_graphs._capture(runner, no_warm_up)
    (line,) = caplog.messages
    assert line.startswith("vllm-async-spec does not capture drafting as CUDA graphs: AttributeError")


def test_what_drafts_without_a_model_is_not_spoken_of(caplog: pytest.LogCaptureFixture):
    runner = make_runner()
    runner.drafter.propose = lambda sampled_token_ids: None
    draft_graphs._capture(runner, no_warm_up)
    draft_graphs._capture(SimpleNamespace(), no_warm_up)
    assert not caplog.records
