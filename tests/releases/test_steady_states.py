"""The V1 runners of 0.21 to 0.29 whose account of requests is kept by a shorter loop, in simulated engines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulation.schedule import Schedule, random_schedule, run, wishful_schedule, with_drains
from undone import applied, module_of

from vllm_async_spec.vllm_plugin.patches import steady_states
from vllm_async_spec.vllm_plugin.patches.steady_states import SteadyStates

SEEDS = (0, 2, 5)
GOES_ON, ADVANCE = SteadyStates.goes_on, SteadyStates.advance


@pytest.fixture(scope="module")
def subject(release: str) -> Iterator[Any]:
    module = module_of(release, "steady-states")
    with applied("steady-states"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady_states, "_FEWEST", 1)
        yield watched(module.GPUModelRunner)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step whether the patch kept the account."""
    found: list[bool] = []

    def noted(self: SteadyStates, *args: Any) -> bool:
        found.append(GOES_ON(self, *args))
        return found[-1]

    monkeypatch.setattr(SteadyStates, "goes_on", noted)
    return found


def watched(runner_class: Any) -> Any:
    """Runners that note their account after each update, and after each correction."""

    class Watched(runner_class):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.accounts: list[Any] = []

        def _update_states(self, scheduler_output: Any) -> Any:
            correct = super()._update_states(scheduler_output)
            self.accounts.append(account(self))
            if correct is None:
                return None

            def corrected() -> None:
                correct()
                self.accounts.append(account(self))

            return corrected

    return Watched


def account(runner: Any) -> dict[str, Any]:
    """All that vLLM's function keeps of the requests of the batch."""
    batch = runner.input_batch
    found: dict[str, Any] = {"rows": dict(batch.req_id_to_index), "known": sorted(runner.requests)}
    found["drafts before"] = runner.prev_num_draft_tokens.np.tolist()
    found["pages"] = [table.block_table.np[: batch.num_reqs].tolist() for table in batch.block_table.block_tables]
    for name, row in batch.req_id_to_index.items():
        state = runner.requests[name]
        found[name] = {
            "computed": (state.num_computed_tokens, int(batch.num_computed_tokens_cpu[row])),
            "output": list(state.output_token_ids),
            "tokens": int(batch.num_tokens_no_spec[row]),
            "ids": batch.token_ids_cpu[row].tolist(),
            "are ids": batch.is_token_ids[row].tolist(),
            "drafts": (state.prev_num_draft_len, list(batch.spec_token_ids[row])),
            "blocks": [list(ids) for ids in state.block_ids],
        }
    return found


def wrong(subject: Any, schedule: Schedule) -> list[str]:
    """Where the accounts first part from those that vLLM's function keeps."""
    found = run(subject, schedule, late=False).runner.accounts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteadyStates, "goes_on", lambda *_: False)
        expected = run(subject, schedule, late=False).runner.accounts
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            parts = [(name, one.get(name), other.get(name)) for name in one if one.get(name) != other.get(name)]
            return [f"account {number}: {name} is {got} instead of {wanted}" for name, wanted, got in parts]
    return [] if len(expected) == len(found) else [f"{len(found)} accounts instead of {len(expected)}"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_account_is_vllms(subject: Any, seed: int, taken: list[bool]):
    assert wrong(subject, random_schedule(seed)) == []
    assert sum(taken) > 3
    assert not all(taken)


def test_the_account_is_vllms_where_outputs_come_early(subject: Any, taken: list[bool]):
    assert wrong(subject, with_drains(random_schedule(0))) == []
    assert sum(taken) > 3


@pytest.mark.parametrize("wishes", [("grammar", "logprobs"), ("penalties", "bad words")])
def test_the_account_is_vllms_where_samplers_read_it(subject: Any, wishes: tuple[str, ...], taken: list[bool]):
    """For penalties vLLM writes the drafts themselves into the lists of drafts, in place."""
    assert wrong(subject, wishful_schedule(3, wishes)) == []
    assert sum(taken) > 3


def test_a_few_requests_are_left_to_vllm(subject: Any, monkeypatch: pytest.MonkeyPatch, taken: list[bool]):
    monkeypatch.setattr(steady_states, "_FEWEST", 100)
    assert wrong(subject, random_schedule(0)) == []
    assert not any(taken)


def forgets_rejections(self: SteadyStates, *args: Any) -> Callable[[], None]:
    ADVANCE(self, *args)
    return lambda: None


def keeps_old_drafts(self: SteadyStates, runner: Any, scheduled: Any) -> Callable[[], None]:
    drafted = runner.prev_num_draft_tokens.np.copy()
    correct = ADVANCE(self, runner, scheduled)
    runner.prev_num_draft_tokens.np[:] = drafted + 1
    return correct


@pytest.mark.parametrize("fault", [forgets_rejections, keeps_old_drafts])
def test_another_account_is_found(subject: Any, fault: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SteadyStates, "advance", fault)
    assert any(wrong(subject, random_schedule(seed)) for seed in SEEDS)


def test_requests_are_looked_up_anew_after_each_step_of_vllms(
    subject: Any, taken: list[bool], monkeypatch: pytest.MonkeyPatch
):
    """One that was preempted has another state under its name."""
    looked, look_up = set[int](), SteadyStates._look_up

    def noted(self: SteadyStates, *args: Any) -> None:
        looked.add(len(taken))
        look_up(self, *args)

    monkeypatch.setattr(SteadyStates, "_look_up", noted)
    run(subject, random_schedule(0), late=False)
    after = {number for number in range(1, len(taken)) if taken[number] and not taken[number - 1]}
    assert after
    assert after <= looked
    assert sum(taken) > len(looked), "nothing was kept"
