"""The V1 runners of 0.19 and later, which carry positions on the device, under random loads on a late device.

Stock waits for no accepted count there, so stock itself must be right. `SIMULATION_LOADS=100` makes a hundred loads.
"""

import functools
import importlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulation import trial
from simulation.engine import Engine
from simulation.happened import EVERYTHING
from simulation.judge import mistakes
from simulation.model import Draft
from simulation.planted_carried import MISTAKES
from simulation.schedule import Schedule, random_schedule, run, wishful_schedule
from simulation.shape import Shape
from simulation.trial import EARLY, LOADS, WISHFUL, been_through, longest_beside
from simulation.wishes import Wishes
from undone import applied

from vllm_async_spec import reset_sync_report, sync_report
from vllm_async_spec.vllm_plugin.patches import min_tokens


@pytest.fixture(scope="module")
def stock(release: str) -> Any:
    """The release's own runner class; one whose host waits for accepted counts is test_simulation.py's."""
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    if not hasattr(runner, "update_num_computed_tokens_for_batch_change"):
        pytest.skip(f"the runner of {release} does not carry positions on the device")
    return runner.GPUModelRunner


@pytest.fixture
def counting(stock: Any) -> Iterator[Any]:
    with applied("min-tokens"):
        yield stock


wrong = functools.partial(trial.wrong, waited=False)


def tokens_wrong(runner_class: Any, schedule: Schedule) -> list[str]:
    return list(mistakes(run(runner_class, schedule, late=True), schedule, waited=False))


@EARLY
@pytest.mark.parametrize("seed", range(LOADS))
def test_stock_is_right_on_a_device_that_runs_late(stock: Any, seed: int, drained: bool):
    assert wrong(stock, stock, random_schedule(seed, drained=drained)) == []


@pytest.mark.parametrize("wish", ["grammar", "logprobs"])
def test_stock_is_right_where_the_host_needs_the_tokens(stock: Any, wish: str):
    assert wrong(stock, stock, wishful_schedule(0, (wish,))) == []


@EARLY
@pytest.mark.parametrize("seed", WISHFUL)
def test_min_tokens_counts_tokens_with_the_plugin(counting: Any, seed: int, drained: bool):
    assert tokens_wrong(counting, wishful_schedule(seed, ("min_tokens",), drained=drained)) == []


def test_stock_allows_a_stop_token_too_early(stock: Any):
    loads = (wishful_schedule(seed, ("min_tokens",), drained=seed == 0) for seed in (0, 1, 7, 9))
    assert any(each.startswith("r") and "tokens" in each for load in loads for each in tokens_wrong(stock, load))


WISHES = {
    "min_tokens": Wishes(min_tokens=20),
    "a few min_tokens": Wishes(min_tokens=4),
    "penalties": Wishes(frequency=1.7),
    "bad words": Wishes(bad_words=((1, 2),)),
}


@pytest.mark.parametrize("wish", WISHES)
def test_a_request_beside_one_with_wishes_reaches_the_longest_sequence(
    counting: Any, wish: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Draft, "wrong", 97)
    got, right = longest_beside(counting, WISHES[wish])
    assert got == right


def alone(runner_class: Any, wishes: Wishes) -> list[int]:
    """Of each step of an engine with one request, how many tokens had come out when it was scheduled."""
    engine, had = Engine(runner_class, Shape(tokens=48), random.Random(0)), list[int]()
    engine.add("one", [1, 2, 3], 40, -1, wishes)
    while engine.busy:
        had.append(len(engine.outputs["one"]))
        engine.step()
    return had


@pytest.mark.parametrize("least", [0, 6, 20])
def test_min_tokens_waits_below_the_minimum_and_never_for_drafts(
    counting: Any, least: int, release: str, monkeypatch: pytest.MonkeyPatch
):
    if release.startswith("0.21."):
        pytest.skip("stock 0.21 waits for tokens and drafts of every batch, by a mistake that 0.22 corrects")
    reads: list[str] = []
    for owner, name in ((counting, "_get_draft_token_ids_cpu"), (min_tokens, "_read_rows")):
        inner = getattr(owner, name)

        def noted(*args: Any, inner: Any = inner, name: str = name) -> Any:
            reads.append(name)
            return inner(*args)

        monkeypatch.setattr(owner, name, noted)
    reset_sync_report()
    had = alone(counting, Wishes(min_tokens=least))
    counts = sync_report().fallbacks.get("min_tokens", 0)
    below = sum(tokens < least for tokens in had)
    # The first step has nothing to wait for, and at the minimum two outputs may be in flight.
    assert max(0, below - 3) <= counts <= below
    assert counts <= len(reads) <= below
    assert set(reads) <= {"_read_rows"}


def replaced(*, drafts: bool = True, holder: Any = None, penalised: frozenset[str] = frozenset()) -> list[list[int]]:
    """The output tokens of two requests, each of which had the placeholders of two steps, one token a step."""
    batch_class = importlib.import_module("vllm.v1.worker.gpu_input_batch").InputBatch
    processor = SimpleNamespace(min_toks={}, **({"add_request": None} if drafts else {}))
    names = ["one", "two"]
    rows = {name: row for row, name in enumerate(names)}
    batch = SimpleNamespace(
        logitsprocs=SimpleNamespace(all=[processor]),
        sampling_metadata=SimpleNamespace(output_token_ids=[[7, -1], [8, -1]]),
        sampled_token_ids_cpu=torch.tensor([[3], [4]]),
        async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
        req_ids=names,
        req_id_to_index=rows,
        prev_req_id_to_index=rows,
        logitsprocs_need_output_token_ids=False,
        no_penalties=not penalised,
        thinking_budget_state_holder=holder,
        frequency_penalties_reqs=penalised,
        presence_penalties_reqs=set(),
        repetition_penalties_reqs=set(),
        bad_words_token_ids={},
    )
    batch_class.update_async_output_token_ids(batch)
    assert batch.prev_req_id_to_index is rows
    tokens: list[list[int]] = batch.sampling_metadata.output_token_ids
    return tokens


@pytest.mark.parametrize("drafts", [False, True])
def test_without_drafts_all_placeholders_are_replaced_as_in_stock(counting: Any, drafts: bool):
    """Then each stands for one token."""
    assert replaced(drafts=drafts, penalised=frozenset({"one"})) == [[7, 3], [8, -1] if drafts else [8, 4]]


class Holder:
    """What vLLM keeps of requests with a thinking budget, by row."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)

    def has_tracked_requests(self) -> bool:
        return True


def test_placeholders_stay_beside_a_request_with_a_thinking_budget(counting: Any):
    """vLLM reads the tokens of that request only; all are replaced where it does not say which it is."""
    assert replaced(holder=Holder(_state={1: {}})) == [[7, -1], [8, 4]]
    assert replaced(holder=Holder(_state={1: {}}), penalised=frozenset({"one"})) == [[7, 3], [8, 4]]
    assert replaced(holder=Holder()) == [[7, 3], [8, 4]]


@pytest.mark.parametrize("wish", ["penalties", "bad words"])
def test_stocks_engine_ends_where_a_request_beside_it_reaches_the_longest_sequence(
    stock: Any, wish: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Draft, "wrong", 97)
    with pytest.raises(AssertionError, match="Sampled token IDs exceed the max model length"):
        longest_beside(stock, WISHES[wish])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_it_is_found(stock: Any, mistake: str):
    faulty = type("Faulty", (MISTAKES[mistake], stock), {})
    # A copy that runs late reads what the host has put right by then, and hides some of them.
    if not any(wrong(faulty, stock, random_schedule(seed), late=late) for seed in range(4) for late in (False, True)):
        pytest.fail(f"4 loads do not show that {MISTAKES[mistake].__doc__}")


def test_the_loads_go_through_everything(stock: Any):
    assert EVERYTHING - been_through(stock) == set()
