"""The V1 runners of 0.19 to 0.29 whose steady steps are prepared by one kernel, in simulated engines."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulation.schedule import Schedule, random_schedule, wishful_schedule
from simulation.trial import wrong_of_patch
from undone import applied, module_of

from vllm_async_spec import kernels
from vllm_async_spec.kernels import advance_batch_reference
from vllm_async_spec.vllm_plugin.patches.steady_inputs import SteadyBatch

SEEDS = (0, 2, 4, 5)
HANDED = SteadyBatch.handed


@pytest.fixture(scope="module")
def subject(release: str) -> Iterator[Any]:
    module = module_of(release, "steady-inputs")
    with pytest.MonkeyPatch.context() as patch, applied("carried-inputs", "steady-inputs"):
        # A late device would run this when its memory is another's; a GPU gives memory back in order.
        patch.setattr(kernels, "compile_advance_batch", lambda device: None)
        yield module.GPUModelRunner


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step whether it was prepared by the kernel."""
    found: list[bool] = []

    def noted(self: SteadyBatch, *args: Any) -> Any:
        handed = HANDED(self, *args)
        found.append(handed is not None)
        return handed

    monkeypatch.setattr(SteadyBatch, "handed", noted)
    return found


def wrong(subject: Any, schedule: Schedule) -> list[str]:
    return wrong_of_patch(subject, schedule, SteadyBatch, "handed", compared=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_models_are_given_what_stock_gives_them(subject: Any, seed: int, taken: list[bool]):
    schedule = random_schedule(seed)
    assert wrong(subject, schedule) == []
    assert sum(taken) > 3 or (schedule.shape.axes and not any(taken))  # vLLM's function prepares M-RoPE's positions
    assert not all(taken)


def test_grammars_may_refuse_drafts_that_stay_on_the_device(subject: Any, taken: list[bool]):
    assert wrong(subject, wishful_schedule(3, ("grammar", "logprobs"))) == []
    assert sum(taken) > 3


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
    buffer = SimpleNamespace(gpu=None)
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
