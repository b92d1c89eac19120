"""Interleaved generation on a GPU: the streams, events, graphs and pinned buffers that the CPU's tests stand in for."""

import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generating import RowsStopAt, Spoils
from interleaving_controls import (
    CONTROLS,
    INTERLEAVED,
    STATIC,
    VOCABULARY,
    delayed,
    generate,
    make_model,
    prompts,
)

from vllm_async_spec import generation
from vllm_async_spec.generation import decode_loops, workspace
from vllm_async_spec.streams import waits_refused

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    made = make_model()
    yield made
    generation.release(made)


def assert_same(model: Any, expected: torch.Tensor, tokens: torch.Tensor) -> None:
    """Where they part, the logits of both choices say whether a rounding could have done it. No row is padded there."""
    assert expected.shape == tokens.shape
    for row, at in (expected != tokens).nonzero()[:1].tolist():
        before = expected[row, :at]
        logits = model(before[before.ne(0).int().argmax() :][None].cuda()).logits[0, -1]
        chosen = [(int(each[row, at]), float(logits[each[row, at]])) for each in (expected, tokens)]
        pytest.fail(f"from token {at} of row {row} on: {chosen[0]} was expected, {chosen[1]} found (token, logit)")


def stops(kind: str) -> dict[str, Any]:
    if kind == "eos":
        return {"eos_token_id": [2, 5, 9, 11, 17]}
    return {
        "stopping_criteria": transformers.StoppingCriteriaList([RowsStopAt([9, 14, 11, 21], "cuda")]),
        "eos_token_id": 2,
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stop", ["eos", "custom"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "way", [{}, {"cuda_graphs": False}, {"static_cache": False}], ids=["graphs", "static", "dynamic"]
)
def test_the_same_tokens_under_random_delays(model: Any, way: dict[str, Any], do_sample: bool, stop: str, seed: int):
    inputs = prompts([3, 1, 4, 2], seed)
    settings = {"max_new_tokens": 40, "do_sample": do_sample, "temperature": 2.0 if do_sample else None}
    expected, state = generate(model, inputs, seed=seed, **settings, **stops(stop), **STATIC)
    with delayed(seed, steps=True, flags=True):
        tokens, state_after = generate(
            model, inputs, seed=seed, **settings, **stops(stop), **INTERLEAVED, **way, max_in_flight=1 + seed % 3
        )
    assert_same(model, expected, tokens)
    assert torch.equal(state, state_after)


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_same_tokens_of_any_batch(model: Any, batch: int, do_sample: bool):
    inputs = prompts([1 + row % 4 for row in range(batch)], batch)
    settings = {"max_new_tokens": 100, "do_sample": do_sample, "eos_token_id": VOCABULARY}
    expected, state = generate(model, inputs, **settings, **STATIC)
    for interleaved in (True, False):
        way = {**INTERLEAVED, "interleaved": interleaved}
        tokens, state_after = generate(model, inputs, **settings, **way)
        assert_same(model, expected, tokens)
        assert torch.equal(state, state_after)


def test_a_second_generation_reads_nothing_that_went_with_the_first(model: Any):
    """Ids of the end are made by transformers at each call; a captured step reads those of its own."""
    inputs = prompts([1], 1)
    settings = {"max_new_tokens": 100, "eos_token_id": VOCABULARY}
    expected, _ = generate(model, inputs, **settings, **STATIC)
    generation.release(model)
    generate(model, inputs, **settings, **INTERLEAVED)
    # All that the first has freed is somebody's again, and holds a token of the sequence: an end, for who reads it so.
    taken = [torch.full((64,), int(expected[0, 50]), device="cuda") for _ in range(10_000)]
    for interleaved in (True, False):
        tokens, _ = generate(model, inputs, **settings, **{**INTERLEAVED, "interleaved": interleaved})
        assert_same(model, expected, tokens)
    assert len(taken) == 10_000


@pytest.mark.parametrize("way", [{}, {"static_cache": False}], ids=["static", "dynamic"])
def test_a_score_that_is_not_a_number_is_an_error_and_breaks_nothing(model: Any, way: dict[str, Any]):
    """Stock's draw from such scores is an assertion on the device, after which the process can use it no more."""
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": VOCABULARY}
    inputs = prompts([3, 1], 0)
    expected, _ = generate(model, inputs, **settings, **STATIC)
    spoils = transformers.LogitsProcessorList([Spoils(12, math.nan)])
    with pytest.raises(RuntimeError, match="no token can be drawn"):
        generate(model, inputs, **settings, **INTERLEAVED, **way, logits_processor=spoils)
    tokens, _ = generate(model, inputs, **settings, **INTERLEAVED, **way)
    assert_same(model, expected, tokens)


@pytest.mark.parametrize("taken", list(CONTROLS))
def test_without_one_wait_the_tokens_go_wrong(taken: str):
    """The control of the tests above. In a process of its own: wrong steps may break the device's context."""
    command = [sys.executable, Path(__file__).parents[1] / "support" / "interleaving_controls.py", taken]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "right with every wait" in done.stdout, done.stdout + done.stderr
    broke = done.returncode != 0 and "CUDA error" in done.stderr
    assert broke or "wrong without one" in done.stdout, f"nothing shows that {taken} has to wait: {done.stderr}"


def test_no_step_makes_the_host_wait_for_the_device(model: Any, monkeypatch: pytest.MonkeyPatch):
    inputs = prompts([3, 2])
    settings = {"max_new_tokens": 60, "do_sample": True, "temperature": 2.0, "eos_token_id": VOCABULARY}
    expected, _ = generate(model, inputs, **settings, **INTERLEAVED)
    loop = decode_loops.interleaved

    def watched(*args: Any, **kwargs: Any) -> int:
        torch.cuda.synchronize()
        with waits_refused():
            return loop(*args, **kwargs)

    monkeypatch.setattr(decode_loops, "interleaved", watched)
    tokens, _ = generate(model, inputs, **settings, **INTERLEAVED)
    assert torch.equal(expected, tokens)


def test_two_slots_share_one_pool_and_nothing_grows(model: Any):
    generation.release(model)
    inputs = prompts([3, 2, 5, 1])
    settings = {"max_new_tokens": 60, "eos_token_id": VOCABULARY}
    generate(model, inputs, **settings, **INTERLEAVED)
    first = generation.memory_report(model)
    assert first.graph_pool > 0
    assert first.cache > 0
    assert len(first.streams) == 2
    for _ in range(20):
        generate(model, inputs, **settings, **INTERLEAVED)
    again = generation.memory_report(model)
    assert (again.graph_pool, again.cache, again.buffers) == (first.graph_pool, first.cache, first.buffers)
    assert sum(again.streams) <= sum(first.streams) + 2 * 2**21, "the streams of the slots hold more and more"
    kept = workspace._kept[model]
    assert kept.graphs is not None
    pools = {tuple(each["segment_pool_id"]) for each in torch.cuda.memory_snapshot()} - {(0, 0)}
    assert tuple(kept.graphs.pool) in pools


def test_one_pool_holds_less_than_two(model: Any):
    from vllm_async_spec.generation.step_graphs import StepGraphs

    inputs = prompts([3] * 4096)  # of fewer, what either graph takes is the least that a pool can hold
    settings = {"max_new_tokens": 20, "eos_token_id": VOCABULARY}
    # What cuBLAS keeps for a stream is in the pool of the first graphs of all.
    generate(model, inputs, **settings, **INTERLEAVED)
    generation.release(model)
    generate(model, inputs, **settings, **INTERLEAVED)
    shared = generation.memory_report(model).graph_pool
    generation.release(model)
    handles = []
    with pytest.MonkeyPatch.context() as patch:
        graph = torch.cuda.graph

        def own_pool(*args: Any, pool: Any, **kwargs: Any) -> Any:
            handles.append(torch.cuda.graph_pool_handle())
            return graph(*args, pool=handles[-1], **kwargs)

        patch.setattr(torch.cuda, "graph", own_pool)
        generate(model, inputs, **settings, **INTERLEAVED)
    assert isinstance(workspace._kept[model].graphs, StepGraphs)
    of_two = {tuple(handle) for handle in handles}
    apart = sum(each["total_size"] for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) in of_two)
    assert len(of_two) == 2
    assert shared < apart
    generation.release(model)


def test_release_gives_the_memory_back(model: Any):
    inputs = prompts([3] * 64)
    # What the libraries keep for each stream stays, and is there before.
    generate(model, inputs, max_new_tokens=500, eos_token_id=VOCABULARY, **INTERLEAVED)
    generation.release(model)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    generate(model, inputs, max_new_tokens=500, eos_token_id=VOCABULARY, **INTERLEAVED)
    held = generation.memory_report(model).total
    generation.release(model)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < held / 2


def test_the_limit_of_memory_is_kept(model: Any):
    inputs = prompts([3])
    with pytest.raises(ValueError, match=r"interleaved generation holds \d+ bytes .* and memory_limit is 1000; raise"):
        generate(model, inputs, max_new_tokens=20, memory_limit=1000, **INTERLEAVED)
    with pytest.raises(LookupError):
        generation.memory_report(model)
    generate(model, inputs, max_new_tokens=20, memory_limit=2**30, **INTERLEAVED)


def test_a_step_that_can_not_be_captured_is_refused_and_the_device_still_works(model: Any):
    class Reads(torch.nn.Module):
        def __init__(self, inner: Any):
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert float(hidden.sum()) == float(hidden.sum())
            return self.inner(hidden, *args, **kwargs)

    inputs = prompts([3])
    expected, _ = generate(model, inputs, max_new_tokens=20, **STATIC)
    plain = model.model.norm
    model.model.norm = Reads(plain)
    generation.release(model)
    try:
        with pytest.raises(ValueError, match=r"can't be captured in a CUDA graph: .* pass cuda_graphs=False"):
            generate(model, inputs, max_new_tokens=20, **INTERLEAVED)
        tokens, _ = generate(model, inputs, max_new_tokens=20, **INTERLEAVED, cuda_graphs=False)
        assert torch.equal(expected, tokens)
    finally:
        model.model.norm = plain
    tokens, _ = generate(model, inputs, max_new_tokens=20, **INTERLEAVED)
    assert torch.equal(expected, tokens)


@pytest.mark.slow
def test_a_compiled_step_generates_the_same_tokens(model: Any):
    inputs = prompts([3, 1, 4, 2])
    settings = {"max_new_tokens": 60, "eos_token_id": VOCABULARY}
    expected, _ = generate(model, inputs, **settings, **STATIC)
    for graphs in (True, False):
        tokens, _ = generate(model, inputs, **settings, **INTERLEAVED, torch_compile=True, cuda_graphs=graphs)
        assert torch.equal(expected, tokens)


EXPANDABLE = """
import torch, transformers
from vllm_async_spec import generation
generation.use_expandable_segments()
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                  num_attention_heads=4)
model = transformers.LlamaForCausalLM(config).eval().cuda()
model.generate(torch.ones(1, 3, dtype=torch.long).cuda(), max_new_tokens=20, pad_token_id=0,
               custom_generate=generation.generate, interleaved=True)
print("expandable", generation.memory_report(model).expandable)
"""


def test_expandable_segments_are_used_where_they_were_asked_for():
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "expandable True" in done.stdout
