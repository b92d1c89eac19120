"""A served plan's order, its failures, and that a run can be broken off and taken up again; nothing of vLLM runs."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from bench_command import bench
from served import PLAN, Fakes, rows_of

from benchmarks.arms import PlanError
from benchmarks.serving import run, servers
from benchmarks.serving.plan import steps
from benchmarks.serving.results import (
    ServeFile,
    faults,
    machines,
    read_served,
    shortened,
    starts,
    summarise,
    unlike,
)
from benchmarks.serving.table import serve_notes

FORWARDS, BACKWARDS = ["stock", "noop", "plugin"], ["plugin", "noop", "stock"]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


def test_arms_take_turns_within_each_load(fakes: Fakes):
    done, result, _ = fakes.run()
    assert done
    whole = [
        f"{load.name}-{number} {arm}"
        for load in PLAN.loads
        for number in (0, 1)
        for arm in (FORWARDS, BACKWARDS)[number]
    ]
    assert fakes.loads == whole
    assert sorted(event for event in fakes.events if event.startswith("start")) == [
        f"start {arm}" for arm in sorted(FORWARDS)
    ]
    assert fakes.events.count("greedy stock") == fakes.events.count("seeded plugin") == 1
    row = next(row for row in summarise(result.document) if (row["load"], row["arm"]) == ("rate-2", "plugin"))
    assert row["n"] == 2
    assert row["ratios"]["TPOT p99"]["value"] == pytest.approx(2)


def test_without_room_for_all_servers_each_pass_of_an_arm_has_one(fakes: Fakes):
    done, _, _ = fakes.run(dataclasses.replace(PLAN, keep=False))
    assert done
    started = [event.removeprefix("start ") for event in fakes.events if event.startswith("start")]
    assert started == ["stock", "noop", "plugin", "noop", "stock"]  # the plugin's passes follow each other


def test_four_passes_are_two_pairs_over_all_loads():
    found = [step for step in steps(dataclasses.replace(PLAN, turns=4)) if step.load]
    assert {step.number for step in found[: len(found) // 2]} == {0, 1}
    places = {name: sum(place for place, step in enumerate(found) if step.arm.name == name) for name in FORWARDS}
    assert len(set(places.values())) == 1  # so that a steady drift meets all arms alike


def test_cold_caches_are_warmed_by_one_server_before_those_with_its_code_start(fakes: Fakes):
    _, result, _ = fakes.run()
    assert {start["arm"]: (start["caches"], start["beside"]) for start in starts(result.document)} == {
        "stock": ("cold", 2),  # compiles code of its own
        "noop": ("cold", 2),
        "plugin": ("shared", 1),
    }
    (fakes.folder / "result.json").unlink()
    _, result, _ = fakes.run()
    assert [(start["caches"], start["beside"]) for start in starts(result.document)] == [("warm", 3)] * 3


def test_a_run_that_is_interrupted_keeps_its_steps_and_goes_on_there(fakes: Fakes):
    fakes.fail({"rate-4-0 noop": "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        fakes.run()
    before = read_served(fakes.folder / "result.json")
    assert len(before["measured"]) == 7
    fakes.fail({})
    earlier = len(fakes.loads)
    done, result, _ = fakes.run()
    assert done
    # The pass that was cut off is measured again as a whole, so that no row is compared with one of the other run.
    assert fakes.loads[earlier : earlier + 3] == ["rate-4-0 stock", "rate-4-0 noop", "rate-4-0 plugin"]
    assert len(fakes.loads) - earlier == 12
    assert result.document["measured"][:7] == before["measured"]
    assert len(result.document["sessions"]) == 2
    assert fakes.run()[0]
    assert len(fakes.loads) - earlier == 12  # nothing was left
    counts = {(row["load"], row["n"]) for row in summarise(result.document)}
    # The third is stock's run of the pass that was cut off.
    assert counts == {("rate-2", 2), ("rate-4", 2), ("rate-4", 3), ("closed-4", 2)}


def test_an_arm_that_comes_later_is_compared_with_runs_of_its_own_session(fakes: Fakes):
    fakes.run(only="stock,noop", loads="rate-2")
    document = read_served(fakes.folder / "result.json")
    for each in document["measured"]:  # as if that host had been ten times as slow
        each["tpot"] = {share: 10 * value for share, value in each["tpot"].items()}
    (fakes.folder / "result.json").write_text(json.dumps(document))
    done, result, _ = fakes.run(loads="rate-2")
    assert done
    assert fakes.loads == [
        *(f"rate-2-{number} {arm}" for number, arms in ((0, FORWARDS[:2]), (1, BACKWARDS[1:])) for arm in arms),
        *(f"rate-2-{number} {arm}" for number, arms in ((0, FORWARDS), (1, BACKWARDS)) for arm in arms),
    ]
    rows = {row["arm"]: row for row in summarise(result.document)}
    assert {arm: row["n"] for arm, row in rows.items()} == {"stock": 4, "noop": 4, "plugin": 2}
    assert rows["plugin"]["ratios"]["TPOT p50"]["value"] == pytest.approx(2)


def test_servers_end_with_the_run(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    held, start = [], servers.Processes.start

    def started(processes: servers.Processes, *arguments: Any, **options: Any) -> dict[str, str]:
        failed = start(processes, *arguments, **options)
        held.append(dict(processes._servers))  # or the end of these objects would end the servers
        return failed

    monkeypatch.setattr(servers.Processes, "start", started)
    fakes.fail({"rate-4-0 noop": "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        fakes.run()
    pids = [int(file.read_text().split()[1]) for file in fakes.folder.iterdir() if file.name.isdecimal()]
    assert len(pids) == len(held[0]) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_step_begins_that_would_end_after_the_budget(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.ServeRunner, "_expected", lambda self, step: 1e6 if step.load is PLAN.loads[1] else 0)
    done, result, lines = fakes.run(budget=1000)
    assert not done
    assert len(result.document["measured"]) == 6
    assert lines[-1] == "steps left: 12; run the same command again for them"


@pytest.mark.parametrize("at", ["rate-2-1 noop", "rate-2-1 stock"])
def test_an_arm_whose_pass_lost_its_reference_is_measured_again(fakes: Fakes, at: str):
    fakes.fail({at: "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        fakes.run(loads="rate-2")
    fakes.fail({})
    earlier = len(fakes.loads)
    assert fakes.run(loads="rate-2")[0]
    assert fakes.loads[earlier:] == [f"rate-2-1 {arm}" for arm in BACKWARDS]


def test_a_server_that_the_budget_cuts_off_has_not_failed(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "_DRAIN_S", 0.0)
    monkeypatch.setattr(servers, "_START_S", 0.05)
    fakes.fail({"start stock": "slow"})
    done, result, lines = fakes.run(budget=0.01)
    assert not done
    assert lines[0] == "stock: its server was not ready within the budget"
    assert lines[-1].startswith("steps left: ")
    assert result.document["failures"] == []


def test_a_server_that_dies_leaves_the_others_and_its_own_earlier_steps(fakes: Fakes):
    fakes.fail({"rate-4-1 plugin": "kill"})
    done, result, lines = fakes.run()
    assert not done
    (failure,) = result.document["failures"]
    assert (failure["load"], failure["arm"], failure["pass"]) == ("rate-4", "plugin", 1)
    assert re.fullmatch(
        r"the server of 'plugin' failed: the process ended by SIGKILL, which the kernel sends when memory runs out: "
        r"the log is empty \(log: .*made-up-plugin\.log\)",
        failure["error"],
    )
    assert [event for event in fakes.loads if "plugin" in event][-1] == "rate-4-1 plugin"
    assert [event for event in fakes.loads if "noop" in event][-1] == "closed-4-1 noop"
    assert lines[-1] == "steps left: 2; run the same command again for them"
    fakes.fail({})
    done, result, _ = fakes.run(retry=True)
    assert done
    assert result.document["failures"] == []


def test_a_port_that_is_taken_is_one_sentence_with_the_logs_path(fakes: Fakes):
    fakes.fail({"start noop": "port"})
    done, result, _ = fakes.run()
    assert not done
    (failure,) = result.document["failures"]
    assert re.fullmatch(
        r"the server of 'noop' failed: the process ended with exit code 1: OSError: \[Errno 98\] error while "
        r"attempting to bind on address \(log: .*made-up-noop\.log\)",
        failure["error"],
    )
    assert {run["arm"] for run in result.document["measured"]} == {"stock", "plugin"}


def test_a_server_that_is_not_what_the_arm_declares_is_not_measured(fakes: Fakes):
    fakes.fail({"start stock": "state"})
    _, result, _ = fakes.run()
    errors = {failure["arm"]: failure["error"] for failure in result.document["failures"]}
    assert errors["stock"] == "the plugin must be 'not loaded' in this arm, and is 'on'"
    assert "there are no tokens of stock to compare with" in errors["plugin"]
    assert {run["arm"] for run in result.document["measured"]} == {"noop", "plugin"}


def test_a_client_that_hangs_is_replaced(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "_SLOWER", 0.0)
    monkeypatch.setattr(run, "_SPARE_S", 2.0)
    fakes.fail({"rate-2-0 noop": "hang"})
    _, result, _ = fakes.run()
    (failure,) = result.document["failures"]
    assert re.fullmatch(
        r"vLLM's client failed: the process gave no answer for 2 s \(log: .*made-up-client-installed\.log\)",
        failure["error"],
    )
    assert len(result.document["measured"]) == len(PLAN.loads) * 6 - 1


def test_a_load_with_failed_requests_counts_as_failed(fakes: Fakes):
    fakes.fail({"rate-2-0 noop": "fail"})
    _, result, _ = fakes.run()
    (failure,) = result.document["failures"]
    assert failure["error"] == "1 of 4 requests failed: ConnectionResetError: lost"
    fakes.run()
    assert fakes.loads.count("rate-2-0 noop") == 1  # only --retry runs it again
    fakes.run(retry=True)
    assert fakes.loads.count("rate-2-0 noop") == 2


def test_tokens_that_differ_are_counted_and_are_a_fault_of_the_plugin_only(fakes: Fakes):
    fakes.fail({"greedy plugin": "tokens", "seeded noop": "tokens", "seeded plugin": "tokens"})
    _, result, _ = fakes.run()
    assert unlike(result.document, "plugin") == {"greedy": 3, "seeded": 3}
    assert unlike(result.document, "noop") == {"greedy": 0, "seeded": 3}
    assert not any("hashes" in sample for sample in result.document["tokens"]["stock"].values())  # needed no more
    # vLLM does not repeat its own seeded tokens, as noop shows, so the plugin's tell nothing.
    assert faults(result.document) == ["plugin: 3 greedy requests have other tokens than stock's"]
    del result.document["tokens"]["noop"]
    assert faults(result.document)[1] == (
        "plugin: 3 seeded requests have other tokens than stock's; "
        "run noop too, which shows whether vLLM repeats its own tokens here"
    )


def test_an_archived_result_has_the_same_rows_but_no_hashes_and_serves_them_again_for_an_arm_that_comes_later(
    fakes: Fakes,
):
    path = fakes.folder / "result.json"
    fakes.run(only="stock,noop", loads="rate-2")
    whole = read_served(path)
    assert "hashes" in whole["tokens"]["stock"]["greedy"]
    short = shortened(whole)
    assert short["tokens"]["stock"]["greedy"].keys() == whole["tokens"]["stock"]["greedy"].keys() - {"hashes"}
    assert {**short, "tokens": whole["tokens"], "measured": whole["measured"]} == whole
    derived = {"seconds", "output_tokens", "request_throughput"}
    assert short["measured"] == [{name: each[name] for name in each.keys() - derived} for each in whole["measured"]]
    assert summarise(short) == summarise(whole)
    path.write_text(json.dumps(short))
    fakes.run(only="stock,noop", loads="rate-2")
    assert fakes.events.count("greedy stock") == 2
    path.write_text(json.dumps(short))
    fakes.fail({"greedy plugin": "tokens"})
    done, result, _ = fakes.run(loads="rate-2")
    assert done
    assert unlike(result.document, "plugin") == {"greedy": 3, "seeded": 0}
    assert shortened({"turns": []}) == {"turns": []}


def test_machines_are_side_by_side_and_never_compared(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    fakes.run(loads="rate-2")
    monkeypatch.setenv("SERVED_DEVICE", "another device")
    _, result, _ = fakes.run()
    assert [*machines(result.document)] == ["a device", "another device"]
    rows = rows_of(result)
    assert [(row["machine"], row["load"]) for row in rows if row["arm"] == "plugin"] == [
        ("1", "rate-2"),
        ("2", "rate-4"),
        ("2", "closed-4"),
    ]
    assert {row["speed by tokens/s, stock = 1"] for row in rows if row["arm"] == "plugin"} == {"2.000 (2.000-2.000)"}
    assert "Machine 2: another device." in serve_notes(result.document)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"only": "stok"}, "plan 'made-up' has no arm 'stok'; --only takes stock, noop, plugin"),
        ({"loads": "rate-3"}, "plan 'made-up' has no load 'rate-3'; --loads takes rate-2, rate-4, closed-4"),
    ],
)
def test_an_unknown_arm_or_load_is_refused(fakes: Fakes, options: dict[str, str], sentence: str):
    with pytest.raises(PlanError, match=re.escape(sentence)):
        fakes.run(**options)


def test_another_plans_file_is_refused(tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"served": 1, "plan": {"name": "another"}}))
    with pytest.raises(PlanError, match="is the result of another plan"):
        ServeFile(path, PLAN)
    path.write_text("{}")
    with pytest.raises(PlanError, match="is not a result of `python -m benchmarks serve`"):
        ServeFile(path, PLAN)


SIDE_BY_SIDE = (
    "4 servers side by side need about {} GB, and the GPU has {} GB; give --one-by-one, or --only with fewer arms, or "
    "run it on a larger GPU"
)


@pytest.mark.parametrize(
    ("plan", "gpus", "why"),
    [
        (
            ["serve-8b"],
            [],
            "its servers need a GPU, and this machine has none; run it where there is one, or take serve-tiny",
        ),
        (["serve-8b"], [80e9], SIDE_BY_SIDE.format(131, 80)),
        (["serve-8b", "--one-by-one"], [80e9], None),
        # Of two ranks each GPU has half the weights; with experts, all others.
        (["serve-8b-tp2"], [141e9], "each of its servers needs 2 GPUs, and this machine has 1; run it on a larger one"),
        (["serve-8b-tp2"], [80e9, 80e9], SIDE_BY_SIDE.format(99, 80)),
        (["serve-8b-tp2"], [141e9, 141e9], None),
        (["serve-moe-dp2"], [70e9, 70e9], SIDE_BY_SIDE.format(76, 70)),
    ],
)
def test_a_plan_without_room_on_the_gpus_is_refused(
    plan: list[str], gpus: list[float], why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("benchmarks.serving.run.has_gpu", lambda: bool(gpus))
    monkeypatch.setattr("benchmarks.serving.run.installed_vllm", lambda: "0.32.0")
    monkeypatch.setattr("benchmarks.serving.run.gpus", lambda: gpus)
    monkeypatch.setattr(run.ServeRunner, "run", lambda *_, **__: True)
    done = bench("serve", *plan, "--out", str(tmp_path), "--cache", str(tmp_path))
    assert done.exit_code == (2 if why else 0)
    assert why is None or done.stderr == f"benchmarks: the plan {plan[0]} can't run here: {why}\n"


def test_no_two_servers_get_one_port(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    ports = iter([41000, 41000, 41001, 41000, 41002])
    monkeypatch.setattr(servers, "free_port", lambda: next(ports))
    assert fakes.run()[0]
    assert {file.name for file in fakes.folder.iterdir() if file.name.isdecimal()} == {"41000", "41001", "41002"}
