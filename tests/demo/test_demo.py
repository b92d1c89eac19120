"""The demo's verdict."""

import importlib.util
from dataclasses import replace

import pytest
from rich.progress import Progress

from vllm_async_spec.demo import compare
from vllm_async_spec.demo.compare import WAYS, DemoError, Result, first_difference
from vllm_async_spec.demo.train import DemoModels


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([[1, 2, 3], [4]], None),
        ([[1, 2, 3], [5]], "prompt 1, token 0: 5 instead of 4"),
        ([[1, 9, 9], [5]], "prompt 0, token 1: 9 instead of 2"),
        ([[1, 2], [4]], "prompt 0: 2 tokens instead of 3"),
        ([[1, 2, 3, 4], [4]], "prompt 0: 4 tokens instead of 3"),
    ],
)
def test_first_difference(tokens, found):
    assert first_difference([[1, 2, 3], [4]], tokens) == found


def results(**changes: object) -> tuple[Result, ...]:
    good = [
        Result(way.name, way.plugin if way.async_scheduling is None else way.async_scheduling, "V1", 1.0, (1.0, 1.0),
               0.0, 2.5 if way.speculative else None, 0.0, 0.0, None)
        for way in WAYS
    ]  # fmt: skip
    return (*good[:-1], replace(good[-1], **changes))


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"acceptance_length": 2.46}, None),
        ({"acceptance_length": 2.4}, "with the plugin: acceptance length fell from 2.500 to 2.400"),
        ({"acceptance_length": None}, "with the plugin: the engine proposed no draft tokens"),
        ({"difference": "prompt 1, token 0: 5 instead of 4"}, "with the plugin: tokens differ, first at prompt 1"),
        ({"async_scheduling": False}, "with the plugin: asynchronous scheduling is unexpectedly off"),
    ],
)
def test_failures(changes, failure):
    found = list(compare._failures(results(**changes)))
    assert (found == []) if failure is None else (len(found) == 1 and found[0].startswith(failure))


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_that_fails_to_start_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "WAYS", WAYS[-1:])
    nowhere = DemoModels(tmp_path / "target", tmp_path / "draft")
    with pytest.raises(DemoError, match=r"the engine for 'with the plugin' failed: .*log: "):
        compare.compare(nowhere, log_dir=tmp_path / "logs", progress=Progress(disable=True))
    (log,) = (tmp_path / "logs").glob("*.log")
    assert str(tmp_path / "target") in log.read_text()
