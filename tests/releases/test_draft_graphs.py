"""The real proposers of 0.14 to 0.29, drafting by replays in simulated engines, where a replay launches again."""

import functools
import importlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from simulation.engine import Engine
from simulation.judge import differences, mistakes
from simulation.schedule import Schedule, random_schedule, run
from undone import applied, module_of

from vllm_async_spec.vllm_plugin.ledger import find_patch
from vllm_async_spec.vllm_plugin.patches import replayed_drafter

SEEDS = [
    *[seed for seed in range(20) if not random_schedule(seed).shape.axes][:4],
    *[seed for seed in range(20) if random_schedule(seed).shape.axes][:2],
]
"""Of loads with plain positions, and with M-RoPE's three axes."""


@pytest.fixture(scope="module")
def stock(release: str) -> Any:
    return module_of(release, "draft-graphs").GPUModelRunner


@pytest.fixture(scope="module")
def subject(stock: Any, release: str) -> Iterator[Any]:
    """The class with all patches of the runner, whose drafter replays from its first batch on."""
    with applied(*[name for name in ("optimistic-runner", "draft-graphs") if release in find_patch(name).releases]):
        yield replaying(importlib.import_module(stock.__module__).GPUModelRunner)


def replaying(runner_class: Any) -> Any:
    """A subclass that makes its drafter's replays when it drafts for the first time, and counts batches.

    Counts those replayed as a whole, and those whose first pass was launched, before the rest was replayed.
    """

    class Replaying(runner_class):  # type: ignore[misc]
        replayed = launched = split = 0

        def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
            if "propose" not in vars(self.drafter):
                self.compilation_config.max_cudagraph_capture_size = 512
                self._replay()
            return super().propose_draft_token_ids(*args, **kwargs)

        def _replay(self) -> None:
            saw, launch, model = self.drafter.model.saw, self.drafter.propose, self.drafter.model
            model.saw = lambda seen: None  # of what runs once before it is captured
            drafter = replayed_drafter.Drafter(self, lambda runs: runs)
            model.saw = saw
            drafter._propose = self._counted("launched", launch)
            drafter._graphs.draft = self._counted("replayed", drafter._graphs.draft)  # type: ignore[method-assign]
            if drafter._rest is not None:
                drafter._rest.draft = self._counted("split", drafter._rest.draft)  # type: ignore[method-assign]
            self.drafter.propose = drafter.propose

        def _counted(self, name: str, call: Any) -> Any:
            def counted(*args: Any, **given: Any) -> Any:
                setattr(self, name, getattr(self, name) + 1)
                return call(*args, **given)

            return counted

    return Replaying


def both(subject: Any, stock: Any, schedule: Schedule) -> tuple[Engine, Engine]:
    """A late run of the subject, and stock's of a device that is not late."""
    return run(subject, schedule, late=True), run(stock, schedule, late=False)


def same_drafts(one: Engine, other: Engine) -> bool:
    pairs = zip(one.steps, other.steps, strict=True)
    return all(np.array_equal(step.drafts, beside.drafts) for step, beside in pairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_and_all_that_models_are_given_are_stock_s(
    stock: Any, subject: Any, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replayed_drafter, "batch_sizes", lambda most: range(1, most + 1))
    schedule = random_schedule(seed)
    engine = run(subject, schedule, late=True)
    assert engine.runner.replayed > 3
    # One draft is sampled from the first pass, so nothing follows it.
    assert engine.runner.split > 3 if schedule.shape.drafts > 1 else engine.runner.launched > 3
    assert list(islice(mistakes(engine, schedule), 3)) == []
    if schedule.stock_is_right and schedule.shape.long_drafter:
        assert list(islice(differences(run(stock, schedule, late=False), engine, schedule), 3)) == []


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_rows_that_are_nobody_s_change_no_draft(stock: Any, subject: Any, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Each batch is filled up to the largest."""
    monkeypatch.setattr(replayed_drafter, "batch_sizes", lambda most: [most])
    schedule = random_schedule(seed)
    engine, reference = both(subject, stock, schedule)
    assert engine.runner.replayed > 3
    assert engine.outputs == reference.outputs
    assert same_drafts(engine, reference)
    filled = 0
    for step, other in zip(engine.steps, reference.steps, strict=True):
        calls = zip(step.calls, other.calls, strict=True)
        filled += any(one.host["num_reqs"] != two.host["num_reqs"] for one, two in calls)
    assert filled > 0


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        *[(False, name) for name in ("block_table", "slot_mapping", "seq_lens")],
        *[(True, name) for name in ("block_table", "seq_lens", "positions", "rejected", "sampled_states")],
    ],
)
def test_inputs_that_are_not_the_batch_s_are_found(
    stock: Any, subject: Any, own: bool, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """Of graphs of all drafting, or of what follows the first pass; else the tests above say nothing."""
    monkeypatch.setattr(replayed_drafter, "batch_sizes", lambda most: [most])
    fill = replayed_drafter.DraftInputs.fill

    def faulty(self: Any, rows: int, given: Any) -> None:
        planted = {fault: given[fault].clone().fill_(1)} if bool(self.shape.own) == own else {}
        fill(self, rows, {**given, **planted})

    monkeypatch.setattr(replayed_drafter.DraftInputs, "fill", faulty)
    schedule = random_schedule(SEEDS[0])
    engine, reference = both(subject, stock, schedule)
    assert not same_drafts(engine, reference)


def test_a_drafter_that_keeps_state_of_each_step_is_not_replayed(subject: Any, monkeypatch: pytest.MonkeyPatch):
    def replay(self: Any) -> None:
        launch = self.drafter.propose

        @functools.wraps(launch)
        def propose(**given: Any) -> Any:
            self.drafter.last_batch = given
            return launch(**given)

        self.drafter.propose = propose
        replayed_drafter.Drafter(self, lambda runs: runs)

    monkeypatch.setattr(subject, "_replay", replay)
    with pytest.raises(ValueError, match="each step sets last_batch of the drafter, which no replay does"):
        run(subject, random_schedule(SEEDS[0]), late=True)


def test_captures_that_fail_half_way_change_nothing(stock: Any, subject: Any, monkeypatch: pytest.MonkeyPatch):
    """Before each batch here. Until they fail they run the drafter, on rows that are nobody's."""
    failed: list[int] = []

    def replay(self: Any) -> None:
        saw, model, kept = self.drafter.model.saw, self.drafter.model, dict(vars(self.drafter))
        captures: list[Any] = []

        def fail(seen: Any) -> None:
            raise RuntimeError("out of memory")

        def capture(runs: Any) -> Any:
            for each in runs:
                captures.append(each)
                if len(captures) == 2:
                    model.saw = fail
                each()
            return runs

        model.saw = lambda seen: None
        with pytest.raises(RuntimeError, match="out of memory"):
            replayed_drafter.Drafter(self, capture)
        model.saw = saw
        assert {name for name, value in vars(self.drafter).items() if value is not kept.get(name)} == set()
        failed.append(len(captures))

    monkeypatch.setattr(subject, "_replay", replay)
    schedule = random_schedule(SEEDS[0])
    engine, reference = both(subject, stock, schedule)
    assert len(failed) > 10
    assert list(islice(mistakes(engine, schedule), 3)) == []
    assert engine.outputs == reference.outputs
    assert same_drafts(engine, reference)
