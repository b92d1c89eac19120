"""The benchmark of continuous batching, on a CPU."""

import contextlib
import dataclasses
import functools
import itertools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_command import bench

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

from generating import make_batches_late

from benchmarks import batching, middle
from benchmarks.acceptance import make_orbit
from benchmarks.arms import expected_length
from benchmarks.batching_arms import Arms
from benchmarks.batching_models import SHARE, make_drafter, make_model, twin
from benchmarks.middle import MiddleError
from vllm_async_spec import generation
from vllm_async_spec.audit.device_time import Shares
from vllm_async_spec.audit.report import Place

SMALL = ["--device", "cpu", "--batch", "2", "--new-tokens", "4", "--passes", "2"]
LINES = {
    "size": "tiny",
    "device": "cpu",
    "batch": 2,
    "requests": 3,
    "prompt": 5,
    "new_tokens": 4,
    "passes": 1,
    "attention": "auto",
}


def run(*options: str) -> Any:
    return bench("batching", *options)


@pytest.mark.parametrize("requests", [2, 3])
def test_all_arms_are_measured_and_give_the_same_tokens(requests: int, tmp_path: Path):
    result = tmp_path / "found.json"
    done = run(*SMALL, "--requests", str(requests), "--json", str(result))
    assert done.exit_code == 0, done.output
    found = json.loads(result.read_text())
    assert tuple(found["tokens_per_second"]) == batching.ARMS
    assert all(len(speeds) == 2 for speeds in found["tokens_per_second"].values())
    assert all(min(speeds) > 0 for speeds in found["tokens_per_second"].values())
    assert found["equal_tokens"] == dict.fromkeys(batching.ARMS, 1.0)
    assert found["gpu_busy"] == found["host_idle"] == {}
    assert found["complete"]
    assert "a CPU shows no gain" in done.output


def test_what_is_done_is_told_and_what_is_known_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = tmp_path / "found.json"
    by_turns = batching.by_turns
    passes = itertools.count(1)

    def cut_off(arms: Any, number: int, turn: Any) -> Any:
        if next(passes) == 1:
            return by_turns(arms, number, turn)
        turn("synchronous")
        raise KeyboardInterrupt

    monkeypatch.setattr(batching, "by_turns", cut_off)
    done = run(*SMALL, "--arms", "synchronous,asynchronous", "--json", str(result))
    assert done.exit_code != 0
    found = json.loads(result.read_text())
    assert not found["complete"]
    assert [len(speeds) for speeds in found["tokens_per_second"].values()] == [1, 1]
    assert found["equal_tokens"] == {"synchronous": 1.0, "asynchronous": 1.0}
    said = [line.partition(": ")[2] for line in done.stderr.splitlines()]
    expected = [
        "making a model of tiny",
        "making the batcher of synchronous, asynchronous, which may capture graphs and compile kernels",
        "synchronous: 4 tokens, not timed",
        "asynchronous: 4 tokens, not timed",
        "pass 1 of 2",
        "synchronous: 4 tokens, timed",
        "asynchronous: 4 tokens, timed",
        "pass 2 of 2",
    ]
    assert [line for line in dict.fromkeys(said) if line in expected] == expected
    assert sum(line.endswith(" tokens/s") for line in said) == 5
    assert sum(line.startswith("a pass, of two turns of 4 tokens for each arm, takes about ") for line in said) == 1


def test_other_tokens_are_refused_and_a_stranger_s_are_counted(monkeypatch: pytest.MonkeyPatch):
    make_arms = batching.make_arms
    wrong = "transformers"

    def altered(*args: Any, **kwargs: Any) -> Arms:
        made = make_arms(*args, **kwargs)
        whole = made.runs[wrong]

        def alter(new_tokens: int) -> list[list[int]]:
            found = whole(new_tokens)
            found[2][3] ^= 1
            return found

        return dataclasses.replace(made, runs=made.runs | {wrong: alter})

    monkeypatch.setattr(batching, "make_arms", altered)
    found = batching.measure(**LINES, arms=list(batching.ARMS))
    assert found["equal_tokens"]["transformers"] == pytest.approx(11 / 12)
    wrong = "asynchronous"
    with pytest.raises(
        batching.BatchingError, match="asynchronous generates other tokens than synchronous, from token 3"
    ):
        batching.measure(**LINES, arms=["synchronous", "asynchronous"])
    wrong = "drafts asynchronous"
    with pytest.raises(
        batching.BatchingError, match="drafts asynchronous generates other tokens than asynchronous, from token 3"
    ):
        batching.measure(**LINES, arms=["transformers", "asynchronous", "drafts asynchronous"], drafts=2)


def test_arms_that_draft_give_the_tokens_of_the_others_and_more_of_them_a_step(tmp_path: Path):
    result = tmp_path / "found.json"
    options = ["--device", "cpu", "--batch", "4", "--requests", "5", "--new-tokens", "40", "--passes", "1"]
    done = run(*options, "--drafts", "3", "--json", str(result))
    assert done.exit_code == 0, done.output
    found = json.loads(result.read_text())
    assert tuple(found["tokens_per_second"]) == (*batching.ARMS, *batching.DRAFTED)
    assert found["drafts"] == 3
    # Their weights are arranged, so transformers too says the same.
    assert found["equal_tokens"] == dict.fromkeys((*batching.ARMS, *batching.DRAFTED), 1.0)
    assert found["accepted"]["asynchronous"] == 1
    assert "transformers" not in found["accepted"]
    for name in batching.DRAFTED:
        assert found["accepted"][name] == pytest.approx(expected_length(SHARE, 3), rel=0.1)
    assert "drafts 3 tokens a step" in done.output
    assert "2.53 tokens a step" in done.output
    table = batching.table(found)
    against = table.columns[[column.header for column in table.columns].index("drafts synchronous = 1")]
    assert [cell == "-" for cell in against.cells] == [True] * 5 + [False]


def test_an_older_transformers_has_no_arm_of_its_own_and_it_is_said(monkeypatch: pytest.MonkeyPatch):
    make_model("tiny", "cpu", arranged=False)  # transformers' own modules ask for it too, when they are imported
    monkeypatch.delattr("transformers.generation.configuration_utils.ContinuousBatchingConfig", raising=False)
    done = run(*SMALL)
    assert done.exit_code == 1
    assert "lacks the continuous batching of version 5; leave out that arm by naming the other arms" in done.output
    assert "Traceback" not in done.output


def test_the_drafter_is_right_as_often_as_is_said_and_never_close():
    """Whatever came before, by a margin that bfloat16 keeps."""
    target, drafter = make_model("tiny", "cpu", arranged=True), make_drafter("tiny", "cpu")
    layers = [weight for name, weight in target.named_parameters() if "proj" in name]
    assert max(weight.std().item() for weight in layers) < 1e-3  # what many layers add has to stay small as well
    vocabulary = target.config.vocab_size
    orbit = make_orbit(vocabulary, SHARE)
    before = torch.randint(vocabulary, (vocabulary - 1, 5), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((before, torch.arange(vocabulary - 1)[:, None]), dim=1)
    said = {}
    for name, model in {"target": target, "drafter": drafter}.items():
        with torch.no_grad():
            best = model(ids).logits[:, -1].topk(2)
        assert ((best.values[:, 0] - best.values[:, 1]) / best.values[:, 0]).min() > 0.1
        said[name] = best.indices[:, 0]
    assert torch.equal(said["target"], orbit.successor)
    assert torch.equal(said["drafter"], torch.where(orbit.wrong, orbit.stranger, orbit.successor))


def test_a_twin_has_the_same_weights_and_an_attention_of_its_own():
    model = make_model("tiny", "cpu", arranged=False)
    other = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    other.set_attn_implementation("eager")
    assert model.config._attn_implementation != "eager"


def test_waits_of_the_middle_are_told_and_where_there_is_none_why(monkeypatch: pytest.MonkeyPatch):
    class Middle:
        def __init__(self, tokens: list[list[int]]) -> None:
            assert [len(each) for each in tokens] == [4] * 3

        def waits_a_step(self, place: Place) -> float:
            return {Place.CRITICAL: 0.25, Place.OVERLAPPED: 1.0}[place]

    def record(run: Any) -> Middle:
        steps: list[None] = []
        tokens = run(lambda: steps.append(None))
        assert len(steps) >= 4
        if next(runs):
            raise MiddleError("too short")
        return Middle(tokens)

    runs = itertools.count()
    monkeypatch.setattr(batching, "record_middle", record)
    measured = batching.measure(**LINES, arms=["synchronous", "asynchronous"])
    assert measured["waits"] == {}
    with contextlib.ExitStack() as stack:
        model = make_model("tiny", "cpu", arranged=False)
        arms = batching.make_arms(
            stack, model, [[1, 2]] * 3, batch=2, new_tokens=4, attention="auto", names=["synchronous", "asynchronous"]
        )
        told, untold = (functools.partial(arms.stepping, name, 4) for name in arms.runs)
        others = [[3, 1]]
        assert [len(each) for each in arms.stepping("synchronous", 4, list, others=others)] == [4], "on other prompts"
        waits = batching._waits(told)
        with pytest.raises(MiddleError, match="too short"):
            batching._waits(untold)
    assert waits == {"critical": 0.25, "overlapped": 1.0}
    found = measured | {"waits": {"synchronous": waits}, "unrecorded": {"asynchronous": "too short"}}
    table = batching.table(found)
    column = table.columns[[column.header for column in table.columns].index("critical waits")]
    assert list(column.cells) == ["0.25", "-"]
    assert any(note == "the waits of asynchronous were not recorded: too short" for note in batching.notes(found))


def test_decodes_are_compiled_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[generation.BatcherConfig] = []

    class Recording(generation.ContinuousBatcher):
        def __init__(self, *arguments: Any, config: generation.BatcherConfig, **options: Any) -> None:
            made.append(config)
            quick = {"torch_compile": "eager"} if config.torch_compile else {}
            super().__init__(*arguments, config=dataclasses.replace(config, **quick), **options)

    monkeypatch.setattr(generation, "ContinuousBatcher", Recording)
    result = tmp_path / "found.json"
    for options in ([], ["--compile"]):
        done = run(*SMALL, "--arms", "synchronous,asynchronous", "--json", str(result), *options)
        assert done.exit_code == 0, done.output
        assert json.loads(result.read_text())["compiled"] == bool(options)
        assert ("the decodes of this package's arms are compiled" in done.output) == bool(options)
    assert [config.torch_compile for config in made] == [False, True]
    assert made[1].decode_sizes == (2,)


def test_shares_are_those_of_the_third_quarter_of_the_steps(monkeypatch: pytest.MonkeyPatch):
    """Of eight steps the fifth and the sixth, where prompts are read and none has ended."""
    at: list[int] = []

    class Profiler:
        start = stop = lambda _: at.append(step)

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("")

    def steps(on_step: Callable[[], None]) -> None:
        nonlocal step
        for step in range(8):  # noqa: B007 the profiler reads it
            on_step()

    step = -1
    trace = types.SimpleNamespace(start=np.array([0, 400]), end=np.array([200, 800]))
    monkeypatch.setattr(middle, "_profiler", Profiler)
    monkeypatch.setattr(middle, "read_trace", lambda _: trace)
    found = middle.shares_of_steps(steps)
    assert at == [4, 6]
    assert found == Shares(busy=4 / 6, launch_gaps=2 / 6, host_idle=0, host_gaps=0)  # from 100 to 700


def test_a_table_has_what_was_recorded_and_says_what_was_not():
    found = {
        "tokens_per_second": {
            "synchronous": [90.0, 110.0],
            "asynchronous": [180.0, 220.0],
            "transformers": [50.0, 50.0],
        },
        "equal_tokens": {"synchronous": 1.0, "asynchronous": 1.0, "transformers": 0.25},
        "accepted": {"synchronous": 1.0, "asynchronous": 1.0},
        "waits": {"asynchronous": {"critical": 0.0, "overlapped": 1.0}},
        "gpu_busy": {"synchronous": 0.75, "asynchronous": 0.979},
        "host_idle": {"asynchronous": 0.004},
    }
    columns = batching.columns(batching.REFERENCES)
    rows = {row[0]: dict(zip(columns, row, strict=True)) for row in batching.rows(found, batching.REFERENCES)}
    assert list(rows) == ["synchronous", "asynchronous", "transformers"]
    assert rows["asynchronous"] == {
        "arm": "asynchronous",
        "tokens/s": "200.0",
        "spread": "180.0-220.0",
        "synchronous = 1": "2.000 (2.000-2.000)",
        "transformers = 1": rows["asynchronous"]["transformers = 1"],
        "drafts synchronous = 1": "-",
        "equal": "100.0%",
        "tokens a step": "1.00",
        "critical waits": "0.00",
        "GPU busy": "97.9%",
        "host-caused idle": "0.40%",
    }
    assert (rows["synchronous"]["critical waits"], rows["synchronous"]["host-caused idle"]) == ("-", "-")
    before = {name: each for name, each in found.items() if name != "host_idle"}  # files from before it was measured
    assert {row[-1] for row in batching.rows(before, [])} == {"-"}


@pytest.mark.gpu
def test_on_a_gpu_the_asynchronous_arms_wait_less_where_it_matters(monkeypatch: pytest.MonkeyPatch):
    """Each synchronous step ends with a wait, where a step keeps the device longer than the host."""
    make_batches_late(monkeypatch)
    lines = LINES | {"device": "cuda", "batch": 4, "requests": 4, "new_tokens": 96}
    arms = ["synchronous", "asynchronous", *batching.DRAFTED]
    found = batching.measure(**lines, arms=arms, drafts=3)
    assert found["unrecorded"] == {}
    assert list(found["waits"]) == list(found["gpu_busy"]) == list(found["host_idle"]) == arms
    for name, waits in found["waits"].items():
        assert (waits["critical"] < 0.5) == ("asynchronous" in name), (name, waits)
    for name in batching.DRAFTED:
        assert found["accepted"][name] == pytest.approx(expected_length(SHARE, 3), rel=0.15)
