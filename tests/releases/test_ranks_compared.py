"""The patch `rank-agreement` on the executor of a real vLLM release: when it asks the ranks."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from undone import applied

from vllm_async_spec.vllm_plugin.patches.rank_agreement import RanksDifferError, decisions


@pytest.fixture
def executor() -> Iterator[type[Any]]:
    module = importlib.import_module("vllm.v1.executor.abstract")
    with applied("rank-agreement"):
        yield module.Executor


class Seconds(float):
    language_model = encoder = 0.0


def started(executor: type[Any], answers: list[dict[str, str]]) -> list[Any]:
    calls: list[Any] = []

    def collective_rpc(self: Any, method: Any, *args: object, **kwargs: object) -> list[Any]:
        calls.append(method)
        return answers if method is decisions else [Seconds()] * len(answers)

    ranks = type("Ranks", (executor,), {"collective_rpc": collective_rpc, "__init__": lambda self: None})
    ranks.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    made: Any = ranks()
    made.parallel_config = SimpleNamespace(world_size=len(answers))
    made.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace())
    try:
        made.initialize_from_config([])
        if hasattr(made, "compile_or_warm_up_model"):
            made.compile_or_warm_up_model()
    except RanksDifferError:
        calls.append(RanksDifferError)
    return calls


def test_ranks_are_asked_once_between_their_caches_and_their_graphs(executor: type[Any]):
    assert started(executor, [{"a": "b"}] * 2) == ["initialize_from_config", decisions, "compile_or_warm_up_model"]
    assert started(executor, [{"a": "b"}, {"a": "c"}]) == ["initialize_from_config", decisions, RanksDifferError]
    assert started(executor, [{"a": "b"}]) == ["initialize_from_config", "compile_or_warm_up_model"]
