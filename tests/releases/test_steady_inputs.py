"""The V1 runners of 0.19 to 0.29 whose steady steps are prepared by one kernel, in simulated engines."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from simulation.schedule import Schedule, random_schedule, wishful_schedule
from simulation.trial import wrong_of_patch
from undone import applied, module_of

from vllm_async_spec import kernels
from vllm_async_spec.kernels import advance_batch_reference
from vllm_async_spec.vllm_plugin.patches.steady_inputs import SteadyBatch

SEEDS = (0, 2, 3, 4, 5)
TAKE_ROWS = SteadyBatch._take_rows


@pytest.fixture(scope="module")
def subject(release: str) -> Iterator[Any]:
    module = module_of(release, "steady-inputs")
    with pytest.MonkeyPatch.context() as patch, applied("carried-inputs", "steady-inputs"):
        # A late device would run this when its memory is another's; a GPU gives memory back in order.
        patch.setattr(kernels, "compile_advance_batch", lambda device: None)
        yield module.GPUModelRunner


def noted(patch: pytest.MonkeyPatch, method: str) -> list[bool]:
    """Of each call of a method of `SteadyBatch`, whether it had something for the kernel."""
    found, real = list[bool](), getattr(SteadyBatch, method)

    def noting(self: SteadyBatch, *args: Any) -> Any:
        made = real(self, *args)
        found.append(made is not None)
        return made

    patch.setattr(SteadyBatch, method, noting)
    return found


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step whether it was prepared by the kernel."""
    return noted(monkeypatch, "handed")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The same of each step whose rows all verify their drafts, and were not all in their places before."""
    return noted(monkeypatch, "gathered")


def wrong(subject: Any, schedule: Schedule) -> list[str]:
    return wrong_of_patch(subject, schedule, SteadyBatch, "handed", compared=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_models_are_given_what_stock_gives_them(subject: Any, seed: int, taken: list[bool], moved: list[bool]):
    schedule = random_schedule(seed)
    assert wrong(subject, schedule) == []
    if schedule.shape.axes:  # vLLM's function prepares M-RoPE's positions
        assert not any(taken + moved)
    else:
        assert sum(taken) - sum(moved) > 3
        assert any(moved)
        assert not all(taken)


def test_grammars_may_refuse_drafts_that_stay_on_the_device(subject: Any, taken: list[bool]):
    assert wrong(subject, wishful_schedule(3, ("grammar", "logprobs"))) == []
    assert sum(taken) > 3


def same_places(self: SteadyBatch, runner: Any, rows: Any) -> None:
    TAKE_ROWS(self, runner, np.arange(len(rows)))


def all_had_drafts(self: SteadyBatch, runner: Any, rows: Any) -> None:
    TAKE_ROWS(self, runner, rows)
    runner.prev_num_draft_tokens.np[rows] = 1


@pytest.mark.parametrize("fault", [same_places, all_had_drafts])
def test_rows_of_other_places_are_found(subject: Any, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SteadyBatch, "_take_rows", fault)
    assert any(wrong(subject, random_schedule(seed)) for seed in SEEDS)


def stale_counts(counts: torch.Tensor, *rest: Any) -> None:
    advance_batch_reference(torch.ones_like(counts), *rest)


def stale_drafts(counts: torch.Tensor, sampled: torch.Tensor, drafts: torch.Tensor, *rest: Any) -> None:
    advance_batch_reference(counts, sampled, torch.zeros_like(drafts), *rest)


@pytest.mark.parametrize("fault", [stale_counts, stale_drafts])
def test_other_inputs_are_found(subject: Any, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "advance_batch", fault)
    assert any(wrong(subject, random_schedule(seed)) for seed in SEEDS)


def test_a_dummy_run_ends_the_batch(subject: Any, monkeypatch: pytest.MonkeyPatch):
    forgotten: list[object] = []
    monkeypatch.setattr(SteadyBatch, "forget", lambda self: forgotten.append(self))
    buffer = SimpleNamespace(gpu=None, np=np.empty(1))
    names = ("num_accepted_tokens", "discard_request_mask", "query_start_loc", "input_ids")
    runner = type("Bare", (subject,), {"__init__": lambda self: None})()
    vars(runner).update(
        {"device": torch.device("cpu")}
        | dict.fromkeys(names, buffer)
        | dict.fromkeys(("num_computed_tokens", "seq_lens", "positions"))
    )
    with pytest.raises(AttributeError):  # vLLM's own function needs more than this
        runner._dummy_run(1)
    assert len(forgotten) == 2  # once as it was made
