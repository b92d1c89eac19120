"""The order of turns, and that a run can be broken off and taken up again; the engines are made up."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_command import bench
from bench_documents import FACTS, PLAN, document, measured, row

from benchmarks import child, runner
from benchmarks.arms import Arm, Plan, PlanError
from benchmarks.caches import waves
from benchmarks.child import ChildError
from benchmarks.plans import PLANS, find_plan
from benchmarks.results import RESULTS, ResultFile, read_result
from benchmarks.runner import Runner
from benchmarks.stored import read_json
from benchmarks.summary import summarise


class Engines:
    def __init__(self) -> None:
        self.started: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.audited: set[str] = set()
        self.envs: list[Path | None] = []
        self.fails: set[str] = set()
        self.limits: list[float] = []

    @contextlib.contextmanager
    def start(self, arm: Arm, loads: Any, *, audit: bool, env: Path | None, limit_s: float, **_: Any) -> Iterator[Any]:
        self.started.append(arm.name)
        self.audited.update([arm.name] * audit)
        self.limits.append(limit_s)
        self.envs.append(env)
        yield _Engine(self, arm)


@dataclasses.dataclass
class _Engine:
    engines: Engines
    arm: Arm

    def wait_until_ready(self) -> None:
        self.engines.asked.append((self.arm.name, "ready"))
        if self.arm.name in self.engines.fails:
            raise ChildError(f"the engine of {self.arm.name!r} failed: out of luck")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.engines.asked.append((self.arm.name, command))
        if arguments.get("load") in self.engines.fails:
            raise ChildError(f"the engine of {self.arm.name!r} failed: no {arguments['load']}")
        audit = {"of": arguments.get("load"), "rank": arguments.get("rank")}
        return {"describe": FACTS, "measure": measured(100), "audit": audit}[command]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(child, "start", made.start)
    return made


def run(
    folder: Path, plan: Plan = PLAN, envs: dict[str, Path] | None = None, **options: Any
) -> tuple[bool, ResultFile]:
    result = ResultFile(folder / "result.json", plan)
    return Runner(plan, result, command="a command", envs=envs or {}, cache=folder).run(**options), result


def run_broken_off(engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch, *, started: int) -> None:
    def start(*args: Any, **kwargs: Any) -> Any:
        if len(engines.started) == started:
            raise KeyboardInterrupt
        return engines.start(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(child, "start", start)
        with pytest.raises(KeyboardInterrupt):
            run(folder)


def test_turns_are_balanced():
    order = [(number, arm.name) for number, arm in PLAN.order()]
    names = [name for _, name in order]
    assert names[:6] == ["plugin", "noop", "stock", "stock", "noop", "plugin"], (
        "what is compared with is there twice first"
    )
    places = {name: [place for place, each in enumerate(names) if each == name] for name in set(names)}
    assert len({sum(found) for found in places.values()}) == 1  # so that a steady drift meets all arms alike
    assert all(len(found) == PLAN.turns for found in places.values())


def test_every_turn_has_a_process_of_its_own_and_every_load(engines, tmp_path):
    done, result = run(tmp_path)
    assert done
    assert engines.started == [arm.name for _, arm in PLAN.order()]
    assert engines.asked.count(("noop", "measure")) == PLAN.turns * len(PLAN.loads)
    assert "summary" not in json.loads(result.path.read_text())
    assert read_result(result.path)["summary"] == result.document["summary"]


def test_kept_engines_are_started_once(engines, tmp_path):
    run(tmp_path, dataclasses.replace(PLAN, keep=True))
    assert engines.started == ["plugin", "noop", "stock"]
    assert engines.asked.count(("stock", "describe")) == PLAN.turns
    assert engines.asked[:3] == [(name, "ready") for name in ("plugin", "noop", "stock")]  # all, before one is timed


@pytest.mark.parametrize(("keep", "number"), [(True, PLAN.turns - 1), (False, 0)])
def test_engines_with_the_plugin_loaded_are_audited_where_it_harms_no_later_turn(engines, tmp_path, keep, number):
    load = PLAN.loads[-1].name
    _, result = run(tmp_path, dataclasses.replace(PLAN, keep=keep, audited=(load,)))
    assert engines.audited == {"noop", "plugin"}  # stock has no agent
    audits = {(turn["pass"], turn["arm"]): turn["audits"] for turn in result.turns if "audits" in turn}
    assert audits == {(number, arm): {load: {"of": load, "rank": 0}} for arm in ("noop", "plugin")}
    places = [place for place, asked in enumerate(engines.asked) if asked == ("noop", "audit")]
    assert all(engines.asked[place - 1] == ("noop", "measure") for place in places)


def test_every_rank_of_an_engine_is_audited(engines, tmp_path):
    load = PLAN.loads[-1].name
    arms = tuple(dataclasses.replace(arm, engine={"tensor_parallel_size": 2}) for arm in PLAN.arms)
    _, result = run(tmp_path, dataclasses.replace(PLAN, arms=arms, audited=(load,)))
    audits = [turn["audits"] for turn in result.turns if "audits" in turn]
    both = {load: {"of": load, "rank": 0}, f"{load}, rank 1": {"of": load, "rank": 1}}
    assert audits == [both] * 2


def test_a_plan_without_audits_starts_no_agent(engines, tmp_path):
    run(tmp_path)
    assert not engines.audited
    assert "audit" not in {command for _, command in engines.asked}


def test_kept_engines_with_the_same_code_to_compile_start_after_one_has(engines, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "empty"))
    _, result = run(tmp_path, dataclasses.replace(PLAN, keep=True))
    assert engines.asked[0] == ("plugin", "ready")
    assert {turn["arm"]: turn["facts"]["beside"] for turn in result.turns} == {"plugin": 1, "noop": 2, "stock": 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("defaults-8b-0.26.0-V1", [{"stock", "FLASH_ATTN"}, {"noop", "plugin"}]),
        ("defaults-8b-0.26.0-V1-tp2", [{"stock", "noop", "FLASH_ATTN"}, {"plugin"}]),
        ("defaults-8b-0.18.1-tp2", [{"stock", "noop"}, {"plugin"}]),
    ],
)
def test_engines_start_at_once_that_do_not_wait_for_code(name, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert [{arm.name for arm in wave} for wave in waves(find_plan(name).arms)] == expected


def test_engines_side_by_side_have_seeds_of_their_own_where_ranks_would_meet_in_one_socket():
    assert [arm.engine.get("seed") for arm in find_plan("defaults-8b-0.18.1-tp2").arms] == [0, 1, 2]
    assert {arm.engine.get("seed") for arm in find_plan("defaults-8b-0.18.1").arms} == {None}


def test_a_kept_engine_that_fails_is_not_started_for_each_turn(engines, tmp_path):
    engines.fails = {"noop"}
    _, result = run(tmp_path, dataclasses.replace(PLAN, keep=True))
    assert engines.started.count("noop") == 1
    errors = [turn["error"] for turn in result.turns if turn["arm"] == "noop"]
    assert errors == ["the engine of 'noop' failed: out of luck"] * PLAN.turns
    assert sum("loads" in turn for turn in result.turns) == 2 * PLAN.turns


def test_a_run_that_was_broken_off_goes_on_where_it_was(engines, tmp_path, monkeypatch):
    run_broken_off(engines, tmp_path, monkeypatch, started=5)
    before = read_json(tmp_path / "result.json")["turns"]
    assert len(before) == 5
    # Single runs are kept where they are the spread: of the arm that has one turn.
    assert {turn["arm"] for turn in before for load in turn["loads"].values() if "runs" in load} == {"plugin"}
    _, result = run(tmp_path)
    # The pass that was cut off is measured again as a whole: its turns would be compared with those of another run.
    order = [arm.name for _, arm in PLAN.order()]
    assert engines.started == [*order[:5], *order[3:]]
    assert [turn_without_runs(turn) for turn in result.turns[:5]] == [turn_without_runs(turn) for turn in before]
    assert [turn.get("session", 0) for turn in result.turns] == [0] * 5 + [1] * 9
    run(tmp_path)
    assert len(engines.started) == len(order) + 2  # nothing was left


def test_only_turns_of_one_session_are_compared():
    found = document({"stock": [100, 100, 100], "noop": [100, 100, 100], "plugin": [200, 200, 200]})
    assert row(found, "plugin")["ratio"]["pairs"] == 3
    for turn in found["turns"]:
        turn["session"] = {"stock": [0, 1, 1], "noop": [0, 1, 1], "plugin": [1, 1, 1]}[turn["arm"]][turn["pass"]]
    found["summary"] = summarise(found)
    assert row(found, "plugin")["ratio"]["pairs"] == 2  # stock's first pass is of another run
    for turn in found["turns"]:
        turn["session"] = 1 if turn["arm"] == "plugin" else 0
    found["summary"] = summarise(found)
    assert row(found, "plugin")["refused"] == "fewer than two control passes"
    assert row(found, "plugin")["turns"] == 3  # no session has both, and what was measured is shown


def turn_without_runs(turn: dict[str, Any]) -> dict[str, Any]:
    loads = {name: {key: load[key] for key in load if key != "runs"} for name, load in turn["loads"].items()}
    return turn | {"loads": loads}


def test_a_budget_ends_between_turns(engines, tmp_path, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(runner.time, "monotonic", lambda: float(next(clock)))
    done, result = run(tmp_path, budget=200)
    assert not done
    assert 1 < len(result.turns) < len(PLAN.order())
    assert run(tmp_path, budget=100_000)[0]


def test_an_engine_that_the_budget_cuts_off_has_not_failed(engines, tmp_path, monkeypatch):
    engines.fails = {"noop"}
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(runner.time, "monotonic", lambda: float(next(clock)))
    done, result = run(tmp_path, budget=60)
    assert not done
    assert engines.started == ["plugin", "noop"]
    assert [turn["arm"] for turn in result.turns] == ["plugin"]
    assert engines.limits[1] < engines.limits[0] < 60


def test_a_turn_whose_pass_lost_its_reference_is_measured_again(engines, tmp_path, monkeypatch):
    run_broken_off(engines, tmp_path, monkeypatch, started=2)
    run(tmp_path)
    assert engines.started[:5] == ["plugin", "noop", "plugin", "noop", "stock"]


def test_more_turns_add_to_what_is_there(engines, tmp_path):
    run(tmp_path, dataclasses.replace(PLAN, turns=2))
    _, result = run(tmp_path, PLAN)
    assert len(result.turns) == len(engines.started) == PLAN.turns * len(PLAN.arms)


def test_only_what_was_asked_for_is_run(engines, tmp_path):
    run(tmp_path, only="plug")
    assert set(engines.started) == {"plugin"}
    run(tmp_path, only="plug,noo")
    assert set(engines.started) == {"plugin", "noop"}


def test_a_failure_is_one_sentence_and_is_tried_again_on_demand(engines, tmp_path):
    engines.fails = {"noop"}
    _, result = run(tmp_path)
    failed = [turn for turn in result.turns if "error" in turn]
    assert {turn["error"] for turn in failed} == {"the engine of 'noop' failed: out of luck"}
    assert len(failed) == PLAN.turns

    engines.fails, before = set(), len(engines.started)
    run(tmp_path)
    assert len(engines.started) == before
    _, result = run(tmp_path, retry=True)
    assert engines.started[before:] == [arm.name for _, arm in PLAN.order()]  # each ratio has its control beside it
    assert not any("error" in turn for turn in result.turns)


def test_what_was_measured_stays_when_a_later_load_fails(engines, tmp_path):
    engines.fails = {"mixed"}
    turn, *_ = run(tmp_path)[1].turns
    assert set(turn["loads"]) == {"decode-1"}
    assert turn["error"] == "the engine of 'plugin' failed: no mixed"


def test_another_plan_does_not_go_into_the_same_file(engines, tmp_path):
    run(tmp_path)
    with pytest.raises(PlanError, match="is the result of another plan or of an older version"):
        run(tmp_path, dataclasses.replace(PLAN, loads=PLAN.loads[:1]))


def test_a_release_runs_in_its_environment_only(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "installed_vllm", lambda: None)
    arms = tuple(Arm(f"of-{release}", "tiny", release=release) for release in ("0.18.1", "0.32.0"))
    plan = dataclasses.replace(PLAN, arms=arms, turns=2, reference="of-0.32.0")
    env = tmp_path / "env.sh"
    done, result = run(tmp_path, plan, {"0.32.0": env})
    assert not done
    assert (engines.started, engines.envs) == (["of-0.32.0"] * 2, [env] * 2)
    assert [turn["arm"] for turn in result.turns] == ["of-0.32.0"] * 2


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_can_be_made(name: str):
    plan = find_plan(name)
    assert plan.name == name
    assert len({arm.name for arm in plan.arms}) == len(plan.arms)


def _measured_before(folder: Path) -> Path:
    """A result that has all turns of its plan."""
    path = folder / "defaults-1b-0.18.1.json"
    path.write_text(json.dumps(read_json(RESULTS / path.name)))
    return path


@pytest.mark.parametrize("fresh", [[], ["--fresh"]], ids=["as it is", "fresh"])
def test_a_plan_for_a_gpu_is_refused_where_there_is_none_and_its_result_is_kept(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    monkeypatch.setattr(child, "start", lambda *args, **kwargs: pytest.fail("an engine was started"))
    there = _measured_before(tmp_path)
    before = there.read_text()
    done = bench("run", "defaults-1b-0.18.1", "--out", str(tmp_path), *fresh)
    assert done.exit_code == 2, done.output
    assert done.output == (
        "benchmarks: the plan defaults-1b-0.18.1 can't run here: its engines need a GPU, and this machine has none; "
        f"run it where there is one, or take overhead-tiny; `python -m benchmarks show {there}` prints what was "
        "measured before\n"
    )
    assert there.read_text() == before


def test_where_nothing_is_missing_nothing_is_printed_as_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "start", lambda *args, **kwargs: pytest.fail("an engine was started"))
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(runner, "installed_vllm", lambda: "0.18.1")
    _measured_before(tmp_path)
    done = bench("run", "defaults-1b-0.18.1", "--out", str(tmp_path))
    assert done.exit_code == 0
    assert done.output.startswith("nothing was run: ")
    assert "ms a step" not in done.output


def test_an_arm_of_a_release_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    done = bench("run", "defaults-1b-0.18.1", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "no environment has vLLM 0.18.1; give --env RELEASE=FILE" in done.output


@pytest.mark.parametrize(("gigabytes", "code"), [(8, 2), (None, 0), (80, 0)])
def test_a_plan_whose_weights_do_not_fit_is_refused(tmp_path, monkeypatch, gigabytes, code):
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(runner, "installed_vllm", lambda: "0.32.0")
    monkeypatch.setattr(runner, "gpu_bytes", lambda: gigabytes and gigabytes * 1e9)
    monkeypatch.setattr(Runner, "run", lambda self, **_: True)
    done = bench("run", "overhead-8b", "--out", str(tmp_path))
    assert done.exit_code == code, done.output
    refused = "can't run here: its engine has 16.1 GB of weights, and the GPU has 8.0 GB; run it on a larger GPU"
    assert (refused in done.output) is (code == 2)


def test_the_memory_is_that_of_the_largest_gpu(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 24576\necho 81559\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert runner.gpu_bytes() == 81559 * 2**20
