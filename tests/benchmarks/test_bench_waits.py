"""What waits, by feature: the cases, and in which order, how often and for how long they are run; engines are fakes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import waits_engines
from bench_command import bench
from waits_engines import Engines

from benchmarks.acceptance import make_orbit
from benchmarks.arms import PlanError, Plugin
from benchmarks.shapes import find_shape, write_models
from benchmarks.waits import run as waits_run
from benchmarks.waits.cases import BATCH, CASES, DRAFT_TOKENS, ENGINES, LOADS, STEADY, Case, WaitsError, find_cases
from benchmarks.waits.cases import requests_of as requests
from benchmarks.waits.result import GROUPS, WaitsResult
from benchmarks.waits.run import Budget, How, WaitsRunner, arm_of, fitting, why

GROUP = GROUPS[0]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(waits_run.child, "start", made.start)
    monkeypatch.setattr(waits_run, "gpu_bytes", lambda: None)
    return made


def run(
    folder: Path,
    *names: str,
    plugin: Plugin = Plugin.NOOP,
    together: int = 4,
    budget: float = float("inf"),
    retry: bool = False,
) -> tuple[bool, dict[str, Any], list[str]]:
    said: list[str] = []
    result = WaitsResult(folder, GROUP, plugin)
    how = How(plugin, 2.0, 32, together, {}, folder, "a command")
    done = WaitsRunner(GROUP, result, how, Budget(budget), said.append).run(find_cases(names), retry=retry)
    return done, json.loads(result.path.read_text())["cases"] if result.path.is_file() else {}, said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_fills_a_batch_and_fits_its_engine(case: Case, tmp_path: Path):
    shape = ENGINES[case.engine].shape("tiny")
    assert shape is not None
    load, asked = requests(case, shape)
    assert (load, asked) == requests(case, shape)
    sequences = sum(each.sampling.get("n", 1) for each in asked)
    assert sequences == load.requests >= load.running == BATCH
    longest = max(each.longest for each in LOADS)
    assert all(len(each.prompt) + each.max_tokens <= longest for each in asked)
    assert all(token < find_shape(shape).target["vocab_size"] for each in asked for token in each.prompt)
    assert all(each.sampling.get("min_tokens", 0) <= each.max_tokens for each in asked)
    if case.reference is not None:
        assert CASES[case.reference].reference is None
        assert CASES[case.reference].engine == ENGINES[case.engine].base
        assert CASES[case.reference].load is case.load
    assert write_models(find_shape(shape), ENGINES[case.engine].method, tmp_path).target.is_dir()


def test_requests_have_what_the_case_is_about():
    def of(name: str) -> list[Any]:
        return requests(CASES[name], "1b")[1]

    assert sum("structured_outputs" in each.sampling for each in of("json-1")) == 1
    assert sum("structured_outputs" in each.sampling for each in of("json-all")) == BATCH
    assert len({each.sampling["seed"] for each in of("seeds")}) == BATCH
    assert len(of("n-4")) == BATCH // 4
    assert Counter(each.adapter for each in of("lora-1")) == {0: 3 * BATCH}
    assert Counter(each.adapter for each in of("lora-8")) == dict.fromkeys(range(8), 12)
    assert len({each.prompt[:48] for each in of("prefix-caching")}) == 1 < len({each.prompt for each in of("churn")})


def test_an_audit_of_drafts_sees_only_decode_steps():
    assert STEADY.output[0] / (DRAFT_TOKENS + 1) >= 8 + 32 + 2


def test_n_gram_drafts_are_the_continuation_of_the_prompt():
    successor = make_orbit(find_shape("1b").target["vocab_size"], 0.7).successor.tolist()
    for each in requests(CASES["ngram"], "1b")[1]:
        output = [each.prompt[-1]]
        while len(output) <= each.max_tokens:
            output.append(successor[output[-1]])
        assert output == list(each.prompt[DRAFT_TOKENS - 1 : DRAFT_TOKENS + each.max_tokens])


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_engines_run_at_vllms_defaults(group: Any):
    sizes = {"dtype", "gpu_memory_utilization", "kv_cache_memory_bytes"}
    for engine in ENGINES.values():
        if engine.shape(group.shape) is not None:
            arm = arm_of(engine, group, Plugin.NOOP)
            assert (arm.release, arm.runner) == (group.release, group.runner)
            assert arm.engine.keys() - sizes - engine.options.keys() == {"enable_prefix_caching", "max_num_seqs"}
            assert arm.engine["enable_prefix_caching"]
            assert arm.engine["max_num_seqs"] is None
            assert not arm.environment


def test_a_case_takes_turns_with_its_reference_and_is_audited_then(engines: Engines, tmp_path: Path):
    done, cases, said = run(tmp_path, "plain", "penalties", "top-k")
    assert done
    assert [arm.name for arm in engines.started] == ["plain"]  # one engine for all
    abba = [("plain", "time_case", name) for name in ("plain", "penalties", "penalties", "plain")]
    assert engines.asked[2:7] == [*abba, ("plain", "audit_case", "penalties")]
    assert engines.asked[:2] == [("plain", "time_case", "plain"), ("plain", "audit_case", "plain")]
    assert list(cases) == ["plain", "penalties", "top-k"]
    assert cases["penalties"]["turns"] == [[[3.0, 50, 1.0]] * 2] * 2
    assert cases["penalties"]["reference"] == [[[2.0, 50, 1.0]] * 2] * 2
    assert cases["plain"]["audit"]["critical"] == [1.5, 0.3]
    assert said[1] == (
        "0.32.0-V2-1b penalties: 3.00 ms a step, 1.500 times its reference (1.500-1.500), 1.50 critical waits a step"
    )


def test_engines_of_a_wave_start_at_once_and_are_timed_before_their_base_is_audited(engines: Engines, tmp_path: Path):
    run(tmp_path, "plain", "lora-1", "lora-8", "eagle", "eagle3", together=3)
    assert [arm.name for arm in engines.started] == ["plain", "lora", "eagle", "plain", "eagle3"]
    first = [ask for ask in engines.asked if ask[2] not in ("eagle3",)]
    kinds = [command for _, command, case in first if case.startswith("lora")]
    assert kinds == ["time_case"] * 4 + ["audit_case"] * 2
    assert engines.asked.index(("plain", "audit_case", "plain")) > engines.asked.index(("eagle", "audit_case", "eagle"))
    turns = [(engine, case) for engine, command, case in engines.asked if command == "time_case"]
    assert turns[:4] == [("plain", "churn"), ("lora", "lora-1"), ("lora", "lora-1"), ("plain", "churn")]


def test_a_model_with_a_prediction_layer_is_compared_with_itself(engines: Engines, tmp_path: Path):
    run(tmp_path, "mtp")
    assert [(arm.name, arm.shape) for arm in engines.started] == [("plain-mla", "mla-dense"), ("mtp", "mla-dense")]
    assert engines.asked[0] == ("plain-mla", "time_case", "plain-mla")


def test_a_run_that_was_broken_off_goes_on_where_it_was(engines: Engines, tmp_path: Path):
    def interrupt(command: str, case: str) -> None:
        if (command, case) == ("audit_case", "top-k"):
            raise KeyboardInterrupt

    engines.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "plain", "penalties", "top-k")
    engines.before = lambda command, case: None
    engines.asked.clear()
    done, cases, _ = run(tmp_path, "plain", "penalties", "top-k")
    assert done
    assert {case for _, command, case in engines.asked if command == "audit_case"} == {"top-k"}
    assert all("audit" in found for found in cases.values())
    started = len(engines.started)
    run(tmp_path, "plain", "penalties", "top-k")
    assert len(engines.started) == started  # nothing was left


def test_what_vllm_refuses_is_kept_in_its_words_and_not_tried_again(engines: Engines, tmp_path: Path):
    engines.fails_to_start["suffix"] = (
        "ValidationError: 1 validation error for VllmConfig Value error, Model Runner V2 does not yet support: "
        "speculative method 'suffix' [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]"
    )
    engines.answers["logprobs-20"] = {"refused": "Requested 20 logprobs, which is greater than max allowed: 5"}
    done, cases, said = run(tmp_path, "suffix", "logprobs-20")
    assert done
    assert cases["suffix"] == {"refused": "Model Runner V2 does not yet support: speculative method 'suffix'"}
    assert cases["logprobs-20"] == {"refused": "Requested 20 logprobs, which is greater than max allowed: 5"}
    assert "0.32.0-V2-1b suffix: vLLM refuses it: Model Runner V2 does not" in said[0]
    started = len(engines.started)
    assert run(tmp_path, "suffix", "logprobs-20")[0]
    assert len(engines.started) == started


def test_no_base_is_waited_for_when_nothing_is_left_to_compare(engines: Engines, tmp_path: Path):
    engines.fails_to_start["suffix"] = "LacksError: this environment has no package arctic-inference; install it"
    done, cases, _ = run(tmp_path, "suffix")
    assert done
    assert cases == {"suffix": {"lacks": "this environment has no package arctic-inference; install it"}}
    assert engines.killed == ["plain"]
    assert engines.asked == []


def test_what_the_machine_lacked_is_tried_again(engines: Engines, tmp_path: Path):
    engines.answers["json-all"] = {"lacks": "this environment has no package xgrammar; install it and run again"}
    run(tmp_path, "json-all")
    engines.answers.clear()
    _, cases, _ = run(tmp_path, "json-all")
    assert "audit" in cases["json-all"]


def test_an_engine_that_dies_takes_one_case_along_and_the_next_wave_has_a_new_one(engines: Engines, tmp_path: Path):
    engines.dies = {("time_case", "penalties"), ("audit_case", "eagle")}
    done, cases, _ = run(tmp_path, "plain", "penalties", "top-k", "eagle")
    assert done
    assert cases["penalties"] == {"failed": "the engine of 'plain' failed: out of luck"}
    assert cases["eagle"]["failed"] == "the engine of 'eagle' failed: out of luck"
    assert "audit" in cases["top-k"]
    assert [arm.name for arm in engines.started] == ["plain", "eagle", "plain"]
    assert run(tmp_path, "penalties", "eagle")[1] == cases  # a failed case is not tried again
    _, cases, _ = run(tmp_path, "penalties", "eagle", retry=True)
    assert all("failed" not in found and "audit" in found for found in cases.values())


def test_a_base_that_does_not_start_ends_the_run_with_its_reason(engines: Engines, tmp_path: Path):
    engines.fails_to_start["plain"] = "RuntimeError: out of memory"
    done, cases, said = run(tmp_path, "plain", "eagle")
    assert not done
    failed = "the engine of 'plain' failed: RuntimeError: out of memory (log: logs/plain.log)"
    assert cases == {"plain": {"failed": failed}}
    assert said[-1] == "0.32.0-V2-1b: no case of this wave could run"
    assert any("out of memory" in line for line in said)


def test_nothing_begins_that_would_end_after_the_budget(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(waits_run.time, "monotonic", lambda: now[0])

    def pass_time(command: str, case: str) -> None:
        now[0] += 10.0

    engines.before = pass_time
    # `plain` takes 20 s, a case after it 50.
    done, cases, said = run(tmp_path, "plain", "penalties", "top-k", "seeds", budget=125.0)
    assert not done
    assert list(cases) == ["plain", "penalties", "top-k"]
    assert said[-1] == "0.32.0-V2-1b: cases left: seeds; run the same command again for them"
    assert now[0] == 120.0


def test_stock_has_no_agent_and_is_timed_only(engines: Engines, tmp_path: Path):
    done, cases, said = run(tmp_path, "plain", plugin=Plugin.STOCK)
    assert done
    assert engines.audits == {False}
    assert cases["plain"]["audit"] is None
    assert said == ["0.32.0-V2-1b plain: 2.00 ms a step, not audited"]
    assert [path.name for path in tmp_path.glob("*.json")] == ["feature-waits-0.32.0-V2-1b-stock.json"]


def test_as_many_engines_run_at_once_as_the_gpu_holds(monkeypatch: pytest.MonkeyPatch):
    eight = next(group for group in GROUPS if group.shape == "8b")
    for size, fit in ((24e9, 2), (85.5e9, 3), (150e9, 5)):
        monkeypatch.setattr(waits_run, "gpu_bytes", lambda size=size: size)
        assert fitting(eight) == fit


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("NotImplementedError: no such thing (log: a.log)", {"refused": "no such thing"}),
        ("ValueError: n must be 1 (log: a.log)", {"refused": "n must be 1"}),
        ("LacksError: no package (log: a.log)", {"lacks": "no package"}),
    ],
)
def test_the_end_of_an_engine_is_told_by_its_exception(said: str, meant: dict[str, str]):
    assert why(waits_run.ChildError(f"the engine of 'plain' failed: {said}")) == meant


@pytest.mark.parametrize("said", ["OutOfMemoryError: no", "EngineError: runs on V1", "the process ended by SIGKILL"])
def test_other_ends_are_failures(said: str):
    assert why(waits_run.ChildError(f"the engine of 'plain' failed: {said}")).keys() == {"failed"}


def test_a_file_of_something_else_is_left_alone(tmp_path: Path):
    path = tmp_path / f"feature-waits-{GROUP.name}.json"
    other = {"feature_waits": 1, "release": "0.1", "runner": "V2", "shape": "1b", "plugin": "noop"}
    for content in ("{}", "[", json.dumps(other)):
        path.write_text(content)
        with pytest.raises(WaitsError, match="is no result of these cases"):
            WaitsResult(tmp_path, GROUP, Plugin.NOOP)


def test_cases_of_two_devices_are_not_mixed(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path, "plain")
    before = next(tmp_path.glob("*.json")).read_text()
    monkeypatch.setitem(waits_engines.FACTS, "hardware", {"device": "another"})
    with pytest.raises(WaitsError, match=r"is of a device, and this machine has another; give another --out"):
        run(tmp_path, "penalties")
    assert next(tmp_path.glob("*.json")).read_text() == before


def test_a_result_that_can_not_be_written_is_kept_elsewhere(engines: Engines, tmp_path: Path):
    (tmp_path / "in-the-way").write_text("")
    with pytest.raises(PlanError, match=r"can't be written .*; .*kept"):
        run(tmp_path / "in-the-way", "plain")


@pytest.mark.parametrize("option", [("--only", "1b"), ("--seconds", "3"), ("--budget-s", "9"), ("--retry",)])
def test_an_option_of_audits_alone_is_refused_without(option: tuple[str, ...]):
    result = bench("features", *option)
    assert (result.exit_code, result.stderr) == (
        1,
        f"benchmarks: {option[0]} has an effect only with --audit; add --audit, or leave it out\n",
    )


def test_a_release_without_an_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("benchmarks.machine.has_gpu", lambda: True)
    monkeypatch.setattr("benchmarks.cli.waits.installed_vllm", lambda: "0.32.0")
    result = bench("features", "--audit", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("benchmarks: no environment has vLLM 0.26.0; give --env RELEASE=FILE, or choose")


def test_the_command_says_what_it_left_out_and_fails_with_a_failed_case(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("benchmarks.cli.waits.installed_vllm", lambda: "0.32.0")
    command = ["features", "--audit", "--cpu", "plain", "mtp", "--cache", str(tmp_path)]
    result = bench(*command)
    assert result.exit_code == 0, result.output
    path = tmp_path / "results" / "feature-waits-0.32.0-V1-tiny.json"
    assert result.output.splitlines() == [
        "0.32.0-V1-tiny mtp: not run, vLLM's CPU platform has no multi-head latent attention",
        "0.32.0-V1-tiny plain: 2.00 ms a step, 1.50 critical waits a step",
        f"written to {path}",
    ]
    assert "nothing to run" in bench(*command).output
    path.unlink()
    engines.dies = {("time_case", "plain")}
    assert bench(*command).exit_code == 1


def test_an_interrupted_command_says_that_the_finished_cases_are_kept(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(command: str, case: str) -> None:
        if case == "penalties":
            raise KeyboardInterrupt

    engines.before = interrupt
    monkeypatch.setattr("benchmarks.cli.waits.installed_vllm", lambda: "0.32.0")
    command = ["features", "--audit", "--cpu", "plain", "penalties", "--cache", str(tmp_path)]
    result = bench(*command)
    assert (result.exit_code, result.stderr) == (
        130,
        "benchmarks: interrupted by SIGINT; finished cases are kept, and the same command runs the rest\n",
    )
    assert '"plain":' in (tmp_path / "results" / "feature-waits-0.32.0-V1-tiny.json").read_text()
