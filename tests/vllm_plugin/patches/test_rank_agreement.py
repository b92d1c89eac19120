"""Ranks that decided differently end the start in one sentence, before they capture anything."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_async_spec import __version__
from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.ledger import Implementation, Ledger, PatchSpec, State, Target
from vllm_async_spec.vllm_plugin.patches import rank_agreement
from vllm_async_spec.vllm_plugin.patches.rank_agreement import RanksDifferError, decisions, refuse_differences
from vllm_async_spec.vllm_plugin.settings import Settings
from vllm_async_spec.vllm_plugin.state import Plugin

ALIKE = {"the plugin": "version 1", "refused patches": "none"}


class XqaBuilder:
    @classmethod
    def get_cudagraph_support(cls, config: object, spec: str) -> Any:
        return SimpleNamespace(name=f"OF_{spec}")


def wrapper(pipeline: int = 1) -> Any:
    group = SimpleNamespace(metadata_builders=[XqaBuilder(), XqaBuilder()], kv_cache_spec="pages")
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        compilation_config=SimpleNamespace(cudagraph_mode="FULL"),
    )
    runner = SimpleNamespace(vllm_config=config, attn_groups=[[group], [group]])
    return SimpleNamespace(worker=SimpleNamespace(model_runner=runner))


CURRENT: list[Any] = []


@contextlib.contextmanager
def set_current(config: Any) -> Iterator[None]:
    CURRENT.append(config)
    try:
        yield
    finally:
        CURRENT.clear()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(set_current_vllm_config=set_current))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    spec = PatchSpec("a-patch", "", "", "", "", (Target("no_such_module", "f", {"1.0": "0" * 16}),))
    plugin = Plugin(Settings.read({}), Ledger({"a-patch": Implementation(lambda *_: None)}, (spec,)))
    monkeypatch.setattr(rank_agreement, "active_plugin", lambda: plugin)
    return plugin


def test_a_rank_says_what_it_decided(plugin: Plugin):
    expected = {
        "the plugin": f"version {__version__}",
        "refused patches": "none",
        "the mode of CUDA graphs": "FULL",
        "attention group 1 of 2": "XqaBuilder with graphs OF_pages",
        "attention group 2 of 2": "XqaBuilder with graphs OF_pages",
    }
    assert decisions(wrapper()) == expected
    assert plugin.ledger is not None
    plugin.ledger.outcomes["a-patch"].state = State.REFUSED
    assert decisions(wrapper()) == expected | {"refused patches": "a-patch"}


def test_a_builder_finds_the_current_configuration_and_a_rank_that_fails_answers(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
):
    """FlashInfer's builder asks for it. Once the error of a rank left the others' answers in vLLM's queues."""
    asked = wrapper()

    def support(cls: object, config: object, spec: str) -> Any:
        assert [asked.worker.model_runner.vllm_config] == CURRENT
        raise AssertionError("no such spec")

    monkeypatch.setattr(XqaBuilder, "get_cudagraph_support", classmethod(support))
    assert decisions(asked) == {"failed": "AssertionError: no such spec"}
    assert CURRENT == []


def test_stages_of_a_pipeline_differ_by_right(plugin: Plugin):
    assert decisions(wrapper(pipeline=2)) == {"the plugin": f"version {__version__}"}


@pytest.mark.parametrize("loaded", [False, True])
def test_a_rank_without_the_plugin_says_so(loaded: bool, plugin: Plugin, monkeypatch: pytest.MonkeyPatch):
    plugin.ledger = None
    monkeypatch.setattr(rank_agreement, "active_plugin", lambda: plugin if loaded else None)
    assert decisions(wrapper()) == {"the plugin": "off"}


def test_ranks_that_agree_start():
    refuse_differences([])
    refuse_differences([ALIKE, dict(ALIKE)])


@pytest.mark.parametrize(
    ("another", "told"),
    [
        (ALIKE | {"refused patches": "draft-graphs"}, "refused patches: none on rank 0, draft-graphs on rank 2"),
        ({"the plugin": "off"}, "the plugin: version 1 on rank 0, off on rank 2"),
        ({"the plugin": "version 1"}, "refused patches: none on rank 0, absent on rank 2"),
        (ALIKE | {"graphs": "FULL"}, "graphs: absent on rank 0, FULL on rank 2"),
    ],
)
def test_a_difference_is_named(another: dict[str, str], told: str):
    with pytest.raises(RanksDifferError, match="VLLM_ASYNC_SPEC=off") as raised:
        refuse_differences([ALIKE, ALIKE, another])
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


Start = Callable[..., tuple[list[Any], list[str]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    lines: list[str] = []
    monkeypatch.setattr(rank_agreement, "inform", lambda message, *values: lines.append(message % values))
    monkeypatch.setattr(rank_agreement.logger, "warning", lambda message, *values: lines.append(message % values))

    def run(answers: list[dict[str, str]] | Exception, ranks: int = 2) -> tuple[list[Any], list[str]]:
        calls: list[Any] = []

        class Executor:
            parallel_config = SimpleNamespace(world_size=ranks)

            def initialize_from_config(self, configs: list[int]) -> str:
                self.collective_rpc("initialize_from_config", args=(configs,))
                self.collective_rpc("compile_or_warm_up_model")
                return "started"

            def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
                calls.append(method)
                if method is not decisions:
                    return [None] * ranks
                if isinstance(answers, Exception):
                    raise answers
                return answers

        with temporarily() as transaction:
            rank_agreement._apply(transaction, SimpleNamespace(Executor=Executor))  # type: ignore[arg-type]
            executor = Executor()
            try:
                assert executor.initialize_from_config([7]) == "started"
            except RanksDifferError as error:
                calls.append(str(error))
            assert "collective_rpc" not in vars(executor)
        return calls, lines

    return run


def test_ranks_are_asked_before_they_capture(start: Start):
    assert start([ALIKE, ALIKE]) == (["initialize_from_config", decisions, "compile_or_warm_up_model"], [])


def test_nothing_is_captured_after_a_difference(start: Start):
    calls, _ = start([ALIKE, {"the plugin": "off"}])
    assert calls[:2] == ["initialize_from_config", decisions]
    assert len(calls) == 3
    assert "off on rank 1" in calls[2]


def test_one_rank_is_not_asked(start: Start):
    assert start([ALIKE], ranks=1) == (["initialize_from_config", "compile_or_warm_up_model"], [])


@pytest.mark.parametrize("why", ["No module named 'vllm_async_spec'", "Can't get attribute 'decisions'"])
def test_a_rank_that_lacks_the_package_is_named(why: str, start: Start):
    calls, _ = start(RuntimeError(f"Worker failed with error '{why}'"))
    assert "a rank has no vllm-async-spec" in calls[2]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (NotImplementedError("no functions"), "decisions are not compared: NotImplementedError: no functions"),
        ([ALIKE], "ranks are not compared: Executor calls only some"),
        ([ALIKE, {"failed": "KeyError: 1"}], "decisions are not compared: rank 1: KeyError: 1"),
    ],
)
def test_an_executor_that_can_not_ask_says_so_and_starts(start: Start, answers: Any, told: str):
    calls, lines = start(answers)
    assert calls[-1] == "compile_or_warm_up_model"
    assert len(lines) == 1
    assert told in lines[0]
