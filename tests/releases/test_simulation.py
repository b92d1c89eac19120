"""vLLM's scheduler and runner under random loads, on a device that runs late.

A run is judged by what must hold of any run and, where stock vLLM is right, by stock's run on a punctual device.
`SIMULATION_LOADS=100` makes it a hundred loads.
"""

import dataclasses
import importlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from simulation.engine import Engine
from simulation.happened import EVERYTHING
from simulation.judge import mistakes, waits
from simulation.model import Draft
from simulation.planted import MISTAKES, faulty
from simulation.planted_exact import MISTAKES as MISTAKES_IN_EXACT
from simulation.planted_exact import exact
from simulation.planted_features import MISTAKES as MISTAKES_IN_FEATURES
from simulation.planted_features import featured
from simulation.schedule import Schedule, random_schedule, run, wishful_schedule, with_drains
from simulation.shape import Shape
from simulation.trial import EARLY, LOADS, WISHFUL, been_through, longest_beside, reference, wrong
from simulation.wishes import Wishes
from undone import applied, module_of

from vllm_async_spec.sync_policy import reset_sync_report, sync_report


@pytest.fixture(scope="module")
def stock(release: str) -> Any:
    return module_of(release, "optimistic-runner").GPUModelRunner


@pytest.fixture(scope="module")
def subject(stock: Any) -> Iterator[Any]:
    with applied("optimistic-runner"):
        yield importlib.import_module(stock.__module__).GPUModelRunner


@pytest.fixture(scope="module")
def wishes(release: str) -> tuple[str, ...]:
    """What a request may ask for beside drafts; min_tokens is refused up to 0.16."""
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    drafted = hasattr(MinTokensLogitsProcessor, "apply_with_spec_decode")
    return ("penalties", "bad words", *(("min_tokens",) if drafted else ()))


def wrongly_counted(engine: Engine, schedule: Schedule) -> list[str]:
    report, needed = sync_report(), Counter(reason for reason in waits(engine, schedule) if reason)
    found = [] if report.fallbacks == needed else [f"fallbacks are {report.fallbacks} instead of {dict(needed)}"]
    counted = sum(site.count for site in report.sites if site.what == "accepted counts")
    return found if counted == needed.total() else [*found, f"{counted} waits instead of {needed.total()}"]


def wrong_or_miscounted(subject: Any, stock: Any, schedule: Schedule) -> list[str]:
    reset_sync_report()
    return wrong(subject, stock, schedule, also=wrongly_counted)


@EARLY
@pytest.mark.parametrize("seed", range(LOADS))
def test_the_plugins_runner_is_right_on_a_device_that_runs_late(subject: Any, stock: Any, seed: int, drained: bool):
    assert wrong(subject, stock, random_schedule(seed, drained=drained)) == []


@pytest.mark.parametrize("wishful", [False, True], ids=["without wishes", "with wishes"])
def test_after_all_outputs_are_processed_the_host_holds_what_stocks_does(
    subject: Any, stock: Any, wishes: tuple[str, ...], wishful: bool
):
    schedule = with_drains(wishful_schedule(0, wishes) if wishful else random_schedule(0))
    assert wrong(subject, stock, schedule) == []
    drained = [step for step in reference(stock, schedule).steps if step.first and step.scheduled["outputs"]]
    assert len(drained) > 3


@EARLY
@pytest.mark.parametrize("seed", WISHFUL)
def test_a_step_that_needs_exact_counts_waits_once_and_says_why(
    subject: Any, stock: Any, wishes: tuple[str, ...], seed: int, drained: bool
):
    assert wrong_or_miscounted(subject, stock, wishful_schedule(seed, wishes, drained=drained)) == []


def test_the_loads_go_exact_for_every_reason_and_back(stock: Any, wishes: tuple[str, ...]):
    seen, returns = set[str | None](), 0
    for seed in WISHFUL:
        schedule = wishful_schedule(seed, wishes)
        reasons = list(waits(reference(stock, schedule), schedule))
        seen |= set(reasons)
        returns += sum(before is not None and after is None for before, after in pairwise(reasons))
    assert seen == {None, *wishes}
    assert returns > 5


def test_a_request_that_goes_exact_reaches_the_longest_sequence(subject: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Draft, "wrong", 97)
    got, right = longest_beside(subject, Wishes(frequency=1.7))
    assert got == right


@pytest.mark.parametrize(
    ("wish", "drained"), [("grammar", False), ("logprobs", False), ("logprobs", True)], ids=["grammar", "logs", "early"]
)
@pytest.mark.parametrize("seed", WISHFUL)
def test_what_needs_no_exact_counts_is_right_without_them(
    subject: Any, stock: Any, wish: str, seed: int, drained: bool
):
    assert wrong_or_miscounted(subject, stock, wishful_schedule(seed, (wish,), drained=drained)) == []


def test_the_scheduler_lets_drafts_past_a_grammar_where_outputs_come_early(subject: Any, stock: Any):
    """The scheduler makes masks along the drafts only for a step that waits for tokens."""
    found = wrong(subject, stock, wishful_schedule(0, ("grammar",), drained=True))
    assert found
    assert "positions" not in found[0]


def test_the_loads_defer_steps_to_a_grammar(stock: Any):
    engine = reference(stock, wishful_schedule(0, ("grammar",)))
    assert 10 < engine.deferred < len(engine.steps)


@pytest.mark.parametrize("mistake", MISTAKES_IN_FEATURES)
def test_a_mistake_in_what_needs_no_exact_counts_is_found(subject: Any, stock: Any, mistake: str):
    wish, what = MISTAKES_IN_FEATURES[mistake]
    if not any(wrong(featured(subject, mistake), stock, wishful_schedule(seed, (wish,))) for seed in WISHFUL):
        pytest.fail(f"{len(WISHFUL)} loads do not show that {what}")


@pytest.mark.parametrize("mistake", MISTAKES_IN_EXACT)
def test_a_mistake_in_going_exact_is_found(subject: Any, wishes: tuple[str, ...], mistake: str):
    what, shows = MISTAKES_IN_EXACT[mistake]
    for seed in (0, 8):
        schedule = wishful_schedule(seed, wishes)
        reset_sync_report()
        engine = run(exact(subject, mistake), schedule, late=True)
        found = [*mistakes(engine, schedule), *wrongly_counted(engine, schedule)]
        if any(shows in each for each in found):
            return
    pytest.fail(f"2 loads do not show that {what}")


def test_the_plugins_runner_waits_for_nothing_but_prepared_inputs_and_outputs(subject: Any, stock: Any):
    schedule = random_schedule(0)
    engine = run(subject, schedule, late=True)
    exact = reference(stock, schedule)
    assert any(
        step.host[name]["num_computed_tokens"] > other.host[name]["num_computed_tokens"]
        for step, other in zip(engine.steps, exact.steps, strict=True)
        for name in step.rows
    )
    # Preparing, sampling and reading a step: of stock's four events in a step one is gone.
    assert len(engine.gpu.waits) < 3 * len(engine.steps)


@pytest.mark.parametrize("seed", range(3))
def test_stock_is_right_on_a_device_that_is_never_late(stock: Any, seed: int):
    assert wrong(stock, stock, random_schedule(seed), late=False) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_correction_is_found(subject: Any, stock: Any, mistake: str):
    if not any(wrong(faulty(subject, mistake), stock, random_schedule(seed)) for seed in range(8)):
        pytest.fail(f"8 loads do not show that {MISTAKES[mistake]}")


def test_the_loads_go_through_everything(stock: Any):
    # 0.14's cache of a hybrid model with an EAGLE head finds nothing, not even the same prompt again.
    possible = EVERYTHING - (set() if finds_prompts(stock) else {"a prompt was found in the prefix cache"})
    assert possible - been_through(stock) == set()


def finds_prompts(stock: Any) -> bool:
    engine = Engine(stock, Shape(blocks=100, prefix_caching=True))
    for name in ("first", "again"):
        engine.add(name, list(range(70)), 2, -1)
        while engine.busy:
            engine.step()
    return next(step.scheduled["computed"]["again"] for step in engine.steps if "again" in step.rows) > 0


def test_stock_subtracts_rejections_twice_where_outputs_come_early(stock: Any):
    assert "positions" in wrong(stock, stock, random_schedule(0, drained=True), late=False)[0]


def test_stocks_draft_steps_write_lengths_that_the_device_has_yet_to_copy(stock: Any):
    assert "seq_lens" in wrong(stock, stock, random_schedule(0))[0]


def test_the_scheduler_frees_keys_of_a_window_that_are_still_seen(stock: Any):
    """It takes drafts in flight for computed. So the loads above keep more of a window than the model sees."""
    schedule = random_schedule(17)
    schedule = dataclasses.replace(schedule, shape=dataclasses.replace(schedule.shape, kept=0))
    assert "input_ids" in wrong(stock, stock, schedule, late=False)[0]


def test_the_scheduler_counts_wrong_when_it_resets_the_prefix_cache_with_drafts_in_flight(stock: Any):
    assert wrong(stock, stock, dataclasses.replace(random_schedule(1), careful=False), late=False)
