"""A hybrid in the V1 runner from 0.19 on, under random loads on a late device: its states decide its tokens."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from simulation.hybrid import HybridEngine, answer
from simulation.schedule import Schedule, random_schedule, run
from simulation.shape import LONGEST
from undone import applied, module_of

from vllm_async_spec import kernels
from vllm_async_spec.kernels import advance_batch_reference
from vllm_async_spec.vllm_plugin.ledger import find_patch
from vllm_async_spec.vllm_plugin.patches import steady_states
from vllm_async_spec.vllm_plugin.patches.linear_attention import KeptStep
from vllm_async_spec.vllm_plugin.patches.steady_inputs import SteadyBatch
from vllm_async_spec.vllm_plugin.patches.steady_states import SteadyStates

PATCHES = ("carried-inputs", "steady-inputs", "steady-states", "linear-attention", "prompt-ends")
LOADS = int(os.environ.get("SIMULATION_LOADS", "4"))


def load(seed: int) -> Schedule:
    """A random load whose requests have two tokens or more, and decode with all their drafts.

    Stock vLLM is wrong otherwise: it decodes a prompt of one token, without a state of its own. And a request that
    loses its drafts goes on from the state of the first token that was verified, whatever was accepted.
    """
    schedule = random_schedule(seed)
    drafts = schedule.shape.drafts
    tokens = schedule.shape.rows * (drafts + 1) + seed % 7
    shape = replace(schedule.shape, states=True, prefix_caching=False, axes=False, tokens=tokens)
    requests = {
        name: ((prompt * 2)[: min(max(2, len(prompt)), LONGEST // 2)], min(count, LONGEST // 2 - 2 * drafts), stop)
        for name, (prompt, count, stop) in schedule.requests.items()
    }
    events = tuple(replace(happens, drafts=drafts, budget=tokens) for happens in schedule.events)
    return replace(schedule, shape=shape, requests=requests, events=events)


def wrong(runner_class: Any, seed: int, *, late: bool = True) -> list[str]:
    """The requests of a load whose tokens are wrong."""
    schedule = load(seed)
    engine = run(runner_class, schedule, late=late, kind=HybridEngine)
    found = []
    for name, (prompt, count, stop) in schedule.requests.items():
        right, got = answer(prompt, count, stop), engine.outputs.get(name, [])
        if got != (right[: len(got)] if engine.finished.get(name) == "abort" else right):
            found.append(f"{name}, ended by {engine.finished.get(name)}, has the tokens {got} instead of {right}")
    return found


@pytest.fixture(scope="module")
def stock(release: str) -> Any:
    module = module_of(release, "prompt-ends")
    if not hasattr(module, "update_num_computed_tokens_for_batch_change"):
        pytest.skip(f"the runner of {release} does not carry positions on the device")
    return module.GPUModelRunner


def test_stock_gives_prompts_that_end_like_a_decode_step_no_state(stock: Any):
    assert any(wrong(stock, seed, late=False) for seed in range(4))


@pytest.fixture(scope="module")
def subject(stock: Any, release: str) -> Iterator[Any]:
    """With all patches of inputs that this release has."""
    names = [name for name in PATCHES if release in find_patch(name).releases]
    with pytest.MonkeyPatch.context() as patch:
        # A late device would run this when its memory is another's; a GPU gives memory back in order.
        patch.setattr(kernels, "compile_advance_batch", lambda device: None)
        patch.setattr(steady_states, "_FEWEST", 1)
        with applied(*names):
            yield stock


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many steps each of these patches took."""
    found = {"steady-inputs": 0, "steady-states": 0, "linear-attention": 0}
    handed, advance, of_next = SteadyBatch.handed, SteadyStates.advance, KeptStep.of_next

    def noted(self: SteadyBatch, *args: Any) -> Any:
        made = handed(self, *args)
        found["steady-inputs"] += made is not None
        return made

    def advanced(self: SteadyStates, *args: Any) -> Any:
        found["steady-states"] += 1
        return advance(self, *args)

    def kept(self: KeptStep, *args: Any) -> Any:
        found["linear-attention"] += 1
        return of_next(self, *args)

    monkeypatch.setattr(SteadyBatch, "handed", noted)
    monkeypatch.setattr(SteadyStates, "advance", advanced)
    monkeypatch.setattr(KeptStep, "of_next", kept)
    return found


@pytest.mark.parametrize("seed", range(LOADS))
def test_all_tokens_are_right_on_a_device_that_runs_late(subject: Any, seed: int):
    assert wrong(subject, seed) == []


def test_each_patch_takes_steps_of_a_load(subject: Any, release: str, taken: dict[str, int]):
    assert wrong(subject, 0) == []
    for name, steps in taken.items():
        assert steps > 3 or release not in find_patch(name).releases, name


def none_accepted(counts: torch.Tensor, *rest: Any) -> None:
    advance_batch_reference(torch.ones_like(counts), *rest)


def states_of_the_step_before(self: KeptStep, *args: Any) -> Any:
    return self.metadata


def of_one_token(self: KeptStep, builder: Any, batch: Any, blocks: torch.Tensor, accepted: torch.Tensor) -> Any:
    return OF_NEXT(self, builder, batch, blocks, torch.ones_like(accepted))


OF_NEXT = KeptStep.of_next


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (kernels, "advance_batch", none_accepted),
        (KeptStep, "of_next", states_of_the_step_before),
        (KeptStep, "of_next", of_one_token),
    ],
)
def test_a_fault_in_it_is_found(
    subject: Any, release: str, owner: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    if owner is kernels and release not in find_patch("steady-inputs").releases:
        pytest.skip(f"steady-inputs is not for {release}")
    monkeypatch.setattr(owner, name, fault)
    assert any(wrong(subject, seed) for seed in range(4))
