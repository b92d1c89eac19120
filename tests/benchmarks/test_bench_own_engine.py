"""A plan of one's own: another with more engine arguments or fewer loads, under another name."""

from pathlib import Path

import pytest
from bench_command import bench

from benchmarks.arms import PlanError
from benchmarks.cli.results import with_engine, with_loads
from benchmarks.plans import find_plan
from benchmarks.plans.serving import find_serve_plan
from benchmarks.results import ResultFile
from benchmarks.serving.arguments import server_arguments

FULL = '{"compilation_config": {"cudagraph_mode": "FULL"}}'


def test_all_arms_get_the_arguments_and_the_plan_another_name():
    plan = find_plan("defaults-1b-0.24.0")
    own = with_engine(plan, FULL, "mine")
    assert (own.name, own.about) == ("mine", f"{plan.about}, with {FULL}")
    for before, after in zip(plan.arms, own.arms, strict=True):
        assert after.engine == {**before.engine, "compilation_config": {"cudagraph_mode": "FULL"}}
        assert (after.name, after.plugin) == (before.name, before.plugin)
    assert with_engine(plan, "", "mine") is plan


def test_an_argument_of_the_plan_is_replaced():
    own = with_engine(find_plan("defaults-1b"), '{"kv_cache_memory_bytes": 7}', "mine")
    assert {arm.engine["kv_cache_memory_bytes"] for arm in own.arms} == {7}


def test_servers_get_them_too(tmp_path: Path):
    own = with_engine(find_serve_plan("serve-tiny"), FULL, "mine")
    line = server_arguments(own.arms[0], models=tmp_path, tokenizer=tmp_path, port=1)
    assert line[line.index("--compilation-config") + 1] == '{"cudagraph_mode": "FULL"}'


@pytest.mark.parametrize("command", [["run", "defaults-8b"], ["serve", "serve-8b"]])
@pytest.mark.parametrize(
    ("options", "name", "sentence"),
    [
        ("FULL", "mine", "--engine is 'FULL'; it must be a JSON object of engine arguments, such as '{\"compilation_"),
        ("[1]", "mine", "--engine is '[1]'; it must be a JSON object"),
        ("{}", "mine", "--engine is '{}'; it must be a JSON object"),
        (FULL, "", "--engine needs a --name other than {plan}, which stands for the plan's own settings\n"),
        (FULL, "{plan}", "--engine needs a --name other than {plan}, "),
        (
            '{"attention_backend": "FLASH_ATTN"}',
            "mine",
            "--engine sets attention_backend, in which the arms of {plan} differ; leave it out\n",
        ),
    ],
)
def test_a_mistake_is_one_sentence(command: list[str], options: str, name: str, sentence: str, tmp_path: Path):
    named = name.replace("{plan}", command[1])
    done = bench(*command, "--engine", options, "--out", str(tmp_path), *(["--name", named] if named else []))
    assert done.exit_code == 1
    assert done.stderr.startswith("benchmarks: " + sentence.replace("{plan}", command[1]))
    assert done.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_result_of_other_settings_is_not_continued(tmp_path: Path):
    """The same name with other arguments is another plan."""
    path = tmp_path / "mine.json"
    plan = find_plan("overhead-tiny")
    ResultFile(path, with_engine(plan, '{"max_num_seqs": 4}', "mine")).add({"pass": 0, "arm": "stock"}, "a command")
    ResultFile(path, with_engine(plan, '{"max_num_seqs": 4}', "mine"))
    with pytest.raises(PlanError, match=r"mine\.json"):
        ResultFile(path, with_engine(plan, '{"max_num_seqs": 8}', "mine"))


def test_fewer_loads_are_measured_and_audited_in_the_plans_order():
    plan = find_plan("v1-1b-0.26.0")
    own = with_loads(plan, "mixed, decode-1", "mine")
    assert [load.name for load in own.loads] == [load.name for load in plan.loads if load.name in ("decode-1", "mixed")]
    assert own.audited == tuple(load for load in plan.audited if load in ("decode-1", "mixed")) != plan.audited
    assert with_loads(plan, "", "") is plan


@pytest.mark.parametrize(
    ("loads", "name", "sentence"),
    [
        ("decode-1", "", "--loads needs a --name other than defaults-8b, which stands for all loads of the plan\n"),
        ("decode-1", "defaults-8b", "--loads needs a --name other than defaults-8b, "),
        ("decode-1,decode-2", "mine", "plan 'defaults-8b' has no load 'decode-2'; --loads takes decode-1, decode-8, "),
    ],
)
def test_a_mistake_in_loads_is_one_sentence(loads: str, name: str, sentence: str, tmp_path: Path):
    named = ["--name", name] if name else []
    done = bench("run", "defaults-8b", "--loads", loads, "--out", str(tmp_path), *named)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("benchmarks: " + sentence)
    assert not [*tmp_path.iterdir()]
