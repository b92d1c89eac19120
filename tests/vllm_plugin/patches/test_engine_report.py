"""A worker reports its engine once, and no failure of the report ends the worker."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.ledger import Implementation, Ledger, Outcome, PatchSpec, State, Target
from vllm_async_spec.vllm_plugin.metrics.publisher import Publisher
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine
from vllm_async_spec.vllm_plugin.patches import engine_report
from vllm_async_spec.vllm_plugin.scheduling import Decision, note
from vllm_async_spec.vllm_plugin.settings import Settings
from vllm_async_spec.vllm_plugin.state import Plugin

Start = Callable[..., tuple[Publisher, list[str]]]


class WorkerWrapperBase:
    def __init__(self, worker: object) -> None:
        self.worker = worker

    def initialize_from_config(self, configs: list[int]) -> int:
        return configs[0]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def run(rank: int, runner: Any) -> tuple[Publisher, list[str]]:
        lines: list[str] = []
        publisher = Publisher()
        spec = PatchSpec("later", "", "", "", "", (Target("no_such_module", "f", {"1.0": "0" * 16}),))
        ledger = Ledger({"later": Implementation(lambda *_: None)}, (spec,))
        monkeypatch.setattr(publisher, "_outcomes", ledger.outcomes | {"audit-worker": Outcome(spec, State.APPLIED)})
        monkeypatch.setattr(engine_report, "publisher", publisher)
        monkeypatch.setattr(engine_report, "active_plugin", lambda: Plugin(Settings.read({}), ledger))
        monkeypatch.setattr(engine_report, "inform", lambda message, *values: lines.append(message % values))
        monkeypatch.setattr(engine_report.logger, "warning", lambda message, *values: lines.append(message % values))
        with temporarily() as transaction:
            module: Any = SimpleNamespace(WorkerWrapperBase=WorkerWrapperBase)
            engine_report._apply(transaction, module)
            worker = SimpleNamespace(rank=rank, model_runner=runner)
            assert WorkerWrapperBase(worker).initialize_from_config([7]) == 7
        return publisher, lines

    return run


def runner(*backends: str, decision: Decision | None = None, on: bool = True) -> Any:
    groups = [SimpleNamespace(backend=SimpleNamespace(get_name=lambda name=name: name)) for name in backends]
    scheduler = SimpleNamespace(async_scheduling=on, max_num_seqs=256, max_num_batched_tokens=8192)
    graphs = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL"), max_cudagraph_capture_size=512)
    config = SimpleNamespace(scheduler_config=scheduler, compilation_config=graphs, speculative_config=None)
    if decision is not None:
        note(config, decision)  # type: ignore[arg-type]
    return SimpleNamespace(vllm_config=config, attn_groups=[groups])


def test_the_engines_runner_backends_and_patches_are_published_and_logged(start: Start):
    decided = Decision(True, "user", "--async-scheduling was given")
    publisher, lines = start(0, runner("FLASH_ATTN", "FLASHINFER", "FLASH_ATTN", decision=decided))
    assert publisher.snapshot().engines == [Engine(True, "user", "V1", "FLASH_ATTN, FLASHINFER")]
    assert lines == [
        "vllm-async-spec: the engine has the V1 runner, attention FLASH_ATTN, FLASHINFER; patches: 1 refused"
    ]


def test_only_the_first_rank_reports_and_offers_another_runner(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_report, "alternative", lambda config, plugin: "to try V2, set A")
    _, lines = start(0, runner("FLASH_ATTN"))
    assert lines[1:] == ["vllm-async-spec: to try V2, set A"]
    publisher, lines = start(1, runner("FLASH_ATTN"))
    assert (publisher.snapshot().engines, lines) == ([], [])


def test_steps_without_a_cuda_graph_are_told(start: Start):
    drafting = runner("FLASH_ATTN")
    drafting.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    _, lines = start(0, drafting)
    assert lines[1].startswith("vllm-async-spec: steps of more than 128 requests with 3 drafts have no CUDA graph")


@pytest.mark.parametrize(
    ("decision", "by"), [(None, "unknown"), (Decision(True, "vllm-async-spec", "because"), "vLLM")]
)
def test_a_decision_that_does_not_hold_is_not_repeated(start: Start, decision: Decision | None, by: str):
    publisher, _ = start(0, runner("FLASH_ATTN", decision=decision, on=False))
    assert publisher.snapshot().engines == [Engine(False, by, "V1", "FLASH_ATTN")]


def test_a_runner_that_nobody_knows_costs_one_line(start: Start):
    publisher, lines = start(0, SimpleNamespace())
    assert publisher.snapshot().engines == []
    assert len(lines) == 1
    assert lines[0].startswith("vllm-async-spec: the engine's state is not reported: AttributeError: ")
