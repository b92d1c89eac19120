"""The V1 runners of 0.19 to 0.29 whose tokens and indices stay on the device, in simulated engines."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulation.schedule import Schedule, random_schedule, wishful_schedule
from simulation.trial import wrong_of_patch
from undone import applied, module_of

from vllm_async_spec.vllm_plugin.patches.carried_inputs import Carried

SEEDS = range(4)
REAL = {name: getattr(Carried, name) for name in ("tokens_of", "metadata")}


@pytest.fixture(scope="module")
def subject(release: str) -> Iterator[Any]:
    module = module_of(release, "carried-inputs")
    with applied("carried-inputs"):
        yield module.GPUModelRunner


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """Of each step, whether tokens were taken from the device, and whether indices were reused."""
    found: dict[str, list[bool]] = {name: [] for name in REAL}
    for name, calls in found.items():

        def noted(self: Carried, *args: Any, inner: Any = REAL[name], calls: list[bool] = calls) -> Any:
            made = inner(self, *args)
            calls.append(made is not None)
            return made

        monkeypatch.setattr(Carried, name, noted)
    return found


def wrong(subject: Any, schedule: Schedule) -> list[str]:
    return wrong_of_patch(subject, schedule, Carried, *REAL, compared=schedule.shape.long_drafter)


@pytest.mark.parametrize("seed", SEEDS)
def test_models_are_given_what_stock_gives_them(subject: Any, seed: int, taken: dict[str, list[bool]]):
    assert wrong(subject, random_schedule(seed)) == []
    for calls in taken.values():
        assert sum(calls) > 3
        assert not all(calls)


def test_grammars_may_refuse_drafts_that_stay_on_the_device(subject: Any, taken: dict[str, list[bool]]):
    """The scheduler replaces refused drafts after the step's inputs are on their way."""
    assert wrong(subject, wishful_schedule(3, ("grammar", "logprobs"))) == []
    assert sum(taken["tokens_of"]) > 3


def stale(self: Carried, *args: Any) -> Any:
    made = REAL["tokens_of"](self, *args)
    return made and (made[0], torch.zeros_like(made[1]))


def shifted(self: Carried, *args: Any) -> Any:
    made = REAL["metadata"](self, *args)
    if made is not None:
        made.draft_token_ids = made.draft_token_ids.roll(1)
    return made


@pytest.mark.parametrize(("name", "fault"), [("tokens_of", stale), ("metadata", shifted)])
def test_other_tokens_are_found(subject: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Carried, name, fault)
    assert any(wrong(subject, random_schedule(seed)) for seed in SEEDS)
