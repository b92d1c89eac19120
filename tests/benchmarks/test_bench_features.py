"""Cases of what else vLLM can do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_command import bench
from feature_answers import FACTS, GPU, good, judged, noted, plain, planted, seen

from benchmarks import runner_on_cpu
from benchmarks.acceptance import arrange, make_orbit
from benchmarks.arms import Plugin
from benchmarks.child import ChildError
from benchmarks.features import run as feature_runs
from benchmarks.features.cases import FEATURES, LOAD, MIN_TOKENS, TEXT_BYTES, Feature, banned_pairs, find_feature
from benchmarks.features.checks import CHECKS, check
from benchmarks.features.files import write_adapter
from benchmarks.features.run import Place, Seen, arm_of, judge
from benchmarks.features.table import feature_grid
from benchmarks.mrope import positions
from benchmarks.shapes import find_shape, write_models
from benchmarks.soak.engine import CONTROLS


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_a_case_is_small_and_the_same_at_each_call(feature: Feature):
    asks = feature.asks()
    assert asks == feature.asks()
    assert 16 <= len(asks) <= 32
    vocabulary = find_shape(feature.shape).target["vocab_size"]
    for ask in asks:
        assert LOAD.prompt[0] <= len(ask.prompt) <= LOAD.prompt[1]
        assert LOAD.output[0] <= ask.max_tokens <= LOAD.output[1]
        assert max(ask.prompt) < vocabulary
        assert ask.sampling.get("min_tokens", 0) < ask.max_tokens
    assert set(feature.seen) <= CHECKS.keys()


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_a_case_has_a_model_and_twins_that_differ_in_the_feature_only(feature: Feature, tmp_path: Path):
    assert write_models(find_shape(feature.shape), feature.method, tmp_path).drafter is not None
    if "changed" in feature.seen:
        asks = feature.asks()
        assert all(one.prompt == other.prompt for one, other in zip(asks[::2], asks[1::2], strict=True))
        assert all(
            one.sampling != other.sampling or one.adapter != other.adapter
            for one, other in zip(asks[::2], asks[1::2], strict=True)
        )


def test_preemption_has_too_few_blocks_and_enough_for_the_longest():
    feature = find_feature("preemption")
    tokens = 16 * feature.engine["num_gpu_blocks_override"]
    asks = feature.asks()
    assert LOAD.longest + 32 < tokens < sum(len(ask.prompt) + ask.max_tokens for ask in asks) / 2
    assert max(len(ask.prompt) for ask in asks) > feature.engine["max_num_batched_tokens"]


def test_banned_are_the_pairs_that_the_drafter_proposes():
    successor = make_orbit(find_shape("tiny-text").target["vocab_size"], 0.9).successor
    pairs = [[ord(each) - ord("!") for each in pair] for pair in banned_pairs()]
    assert len(pairs) > 20
    assert all(int(successor[first]) == second < TEXT_BYTES for first, second in pairs)


SEEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "accepted": (lambda made: made.update(accepted=1.0), "eagle"),
    "chunked": (lambda made: made["steps"].update(chunks=0), "preemption"),
    "preempted": (lambda made: made["steps"].update(resumed=0), "preemption"),
    "cached": (lambda made: made["steps"].update(cached=0), "prefix-caching"),
    "M-RoPE": (lambda made: made.update(mrope=False), "mrope"),
    "changed": (lambda made: [one.update(tokens=[1, 2]) for one in made["requests"]], "penalties"),
    "grammar": (lambda made: made["requests"][1].update(text="No"), "structured-output"),
    "bad words": (lambda made: made["requests"][1].update(text=banned_pairs()[0]), "bad-words"),
    "min tokens": (lambda made: made["requests"][1].update(tokens=[1] * (MIN_TOKENS - 1)), "min-tokens"),
    "logprobs": (lambda made: made["requests"][1].update(logprobs=[-1.0]), "logprobs"),
}


@pytest.mark.parametrize(("name", "spoil", "feature"), [(name, *each) for name, each in SEEN.items()], ids=SEEN)
def test_what_has_to_be_seen_is_missed_when_it_is_not_there(
    name: str, spoil: Callable[[dict[str, Any]], None], feature: str
):
    case = find_feature(feature)
    made = good(case)
    assert {one["what"]: one["held"] for one in check(case, made)}[name]
    spoil(made)
    assert not {one["what"]: one["held"] for one in check(case, made)}[name]


def test_every_check_is_looked_for_somewhere():
    assert SEEN.keys() == CHECKS.keys() == {name for feature in FEATURES.values() for name in feature.seen}


class FakeChild:
    """Answers as a good engine; dies over the cases of `deadly`."""

    def __init__(self, started: list[Any], arm: Any, deadly: set[str]) -> None:
        self._arm, self._deadly = arm, deadly
        started.append(arm)

    def wait_until_ready(self) -> None:
        if "start" in self._deadly:
            raise ChildError("no device")

    def ask(self, command: str, **more: Any) -> dict[str, Any]:
        if command == "describe":
            return dict(FACTS)
        feature = find_feature(more["name"])
        if feature.name in self._deadly:
            raise ChildError("out of memory")
        made = noted(feature) if more["noted"] else good(feature)
        if self._arm.plugin is Plugin.ON and feature.fallback:
            made["fallbacks"] = {feature.fallback: 3}
        return made

    def __enter__(self) -> FakeChild:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[list[Any], set[str], Place]:
    started: list[Any] = []
    deadly: set[str] = set()

    def start(arm: Any, loads: Any, *, log: Path, **_: Any) -> FakeChild:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("WARNING Async scheduling not supported with ngram-based speculative decoding and will be off\n")
        return FakeChild(started, arm, deadly)

    monkeypatch.setattr(feature_runs.child, "start", start)
    return started, deadly, Place("0.18.1", None, tmp_path)


def run(place: Place, *names: str) -> dict[str, dict[str, Any]]:
    features = [find_feature(name) for name in names]
    found = feature_runs.run_features(features, place, plugin=Plugin.ON, control=None, report=lambda line: None)
    return {feature.name: each for feature, each in found}


def test_cases_with_the_same_engine_share_it(engines: tuple[list[Any], set[str], Place]):
    started, _, place = engines
    found = run(place, "eagle", "mrope", "logprobs")
    assert [found[name]["verdict"] for name in found] == ["as stock"] * 3, [each["why"] for each in found.values()]
    assert [(arm.shape, arm.plugin.value) for arm in started] == [
        ("tiny", "stock"),
        ("tiny", "plugin"),
        ("tiny-mrope", "stock"),
        ("tiny-mrope", "plugin"),
    ]


def test_an_engine_that_dies_takes_only_its_case_along(engines: tuple[list[Any], set[str], Place]):
    started, deadly, place = engines
    deadly.add("logprobs")
    found = run(place, "eagle", "logprobs", "top-k")
    assert {name: each["verdict"] for name, each in found.items()} == {
        "eagle": "as stock",
        "logprobs": "wrong",
        "top-k": "as stock",
    }
    assert found["logprobs"]["why"] == ["out of memory", "out of memory"]
    assert len(started) == 4


def test_engines_that_do_not_start_stop_nothing_else(engines: tuple[list[Any], set[str], Place]):
    _, deadly, place = engines
    deadly.add("start")
    found = run(place, "eagle", "logprobs", "mrope")
    assert {each["verdict"] for each in found.values()} == {"wrong"}
    assert all(each["errors"] == {"stock": "no device", "plugin": "no device"} for each in found.values())


def test_what_vllm_says_of_asynchronous_scheduling_is_kept(engines: tuple[list[Any], set[str], Place]):
    _, _, place = engines
    found = run(place, "ngram")["ngram"]
    assert found["says"] == "Async scheduling not supported with ngram-based speculative decoding and will be off"
    assert found["why"] == [f"scheduling was asynchronous: {found['says']}"]


def test_asynchronous_scheduling_is_asked_for_where_vllm_has_it(tmp_path: Path):
    place = Place("0.18.1", None, tmp_path)
    asked = {name for name, each in FEATURES.items() if arm_of(each, place, Plugin.ON).engine.get("async_scheduling")}
    assert FEATURES.keys() - asked == {"ngram"}


def test_on_a_cpu_the_plugin_alone_changes_the_runner_as_on_a_gpu(tmp_path: Path):
    on, off, stock = (
        arm_of(FEATURES["eagle"], Place("0.26.0", None, tmp_path, cpu=True), plugin).environment
        for plugin in (Plugin.ON, Plugin.NOOP, Plugin.STOCK)
    )
    assert on == off | runner_on_cpu.ENVIRONMENT
    assert off == stock
    assert not off.keys() & runner_on_cpu.ENVIRONMENT.keys()


def test_the_adapter_is_as_wide_as_the_model(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(write_adapter(tmp_path, find_shape("tiny").target) / "adapter_model.safetensors")
    sizes = {name.split("self_attn.")[1]: tuple(weight.shape) for name, weight in weights.items() if ".0." in name}
    assert sizes["v_proj.lora_A.weight"] == (8, 128)
    assert sizes["v_proj.lora_B.weight"] == (64, 8)
    assert len(weights) == 2 * 3 * 2
    assert all(weight.any() for weight in weights.values())
    assert not weights["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"][:2].any()


def test_positions_of_a_picture_differ_by_axis_and_end_behind_the_tokens():
    axes, delta = positions(60)
    assert axes.shape == (3, 60)
    assert len({tuple(axis.tolist()) for axis in axes}) == 3
    assert delta == int(axes.max()) + 1 - 60 < 0


class Eagle3(torch.nn.Module):
    """The layer of vLLM's EAGLE-3 head, without its rotation: (embedding, three hidden states) to a hidden state."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.embed_tokens = torch.nn.Embedding(vocabulary, hidden)
        self.fc, self.qkv_proj = linear(3 * hidden, hidden, bias=False), linear(2 * hidden, 3 * hidden, bias=False)
        self.o_proj, self.lm_head = linear(hidden, hidden, bias=False), linear(hidden, vocabulary, bias=False)
        self.input_layernorm, self.hidden_norm, self.norm = (torch.nn.RMSNorm(hidden) for _ in range(3))
        for weight in self.parameters():
            torch.nn.init.uniform_(weight, -1e-3, 1e-3, generator=torch.Generator().manual_seed(1))

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        residual = self.fc(hidden)
        both = torch.cat((self.input_layernorm(self.embed_tokens(tokens)), self.hidden_norm(residual)), -1)
        query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv_proj(both).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.lm_head(self.norm(self.o_proj(mixed.transpose(1, 2).flatten(-2)) + residual))
        return out


def test_an_eagle3_drafter_is_wrong_after_the_marked_tokens_only():
    drafter = Eagle3(128, 1024)
    arrange(drafter, 1024, 0.9)
    orbit = make_orbit(1024, 0.9)
    tokens = torch.randint(orbit.stranger, (64, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        said = drafter(tokens, torch.randn(64, 16, 384)).argmax(-1)
    meant = torch.where(orbit.wrong[tokens], orbit.stranger, orbit.successor[tokens])
    assert (said == meant).float().mean() > 0.98


def test_the_table_has_a_row_for_each_case_and_says_what_was_not_run(tmp_path: Path):
    assert all("not run" in row for row in feature_grid(tmp_path).rows)
    biased = find_feature("logit-bias")
    refused = Seen(error=biased.refused)
    results = {
        "eagle": judged(plain(), seen(plain(), planted(5, 3, 999))),
        "logprobs": judged(plain("logprobs"), seen(plain("logprobs"), planted(5, 3, 997))),
        "mtp": judge(plain("mtp"), Seen(error="no device"), Seen(), GPU, Plugin.ON),
        "logit-bias": judge(biased, refused, refused, GPU, Plugin.ON),
    }
    for name, found in results.items():
        (tmp_path / f"features-{name}.json").write_text(json.dumps(found))
    rows = {row[0].split("`")[1]: row for row in feature_grid(tmp_path).rows}
    assert rows.keys() == FEATURES.keys()
    assert rows["eagle"][3] == "23 of 24 as stock, 1 near tie (0.025)"
    assert rows["logprobs"][3] == "23 of 24 as stock, **1 different**"
    assert rows["mtp"][3] == "**not served**: no device"
    assert rows["logit-bias"][3].startswith("vLLM refuses it: “logit_bias")
    assert rows["mrope"][3] == "not run"


def test_a_result_is_named_for_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run_features(features: Any, place: Any, *, plugin: Plugin, control: str | None, report: Any) -> Any:
        found = {"feature": "eagle", "verdict": "wrong", "why": ["it is late"]}
        yield features[0], found | {"plugin": plugin.value, "control": control}

    monkeypatch.setattr("benchmarks.cli.tokens.run_features", run_features)
    monkeypatch.setattr("benchmarks.machine.has_gpu", lambda: True)
    env = tmp_path / "env.sh"
    env.touch()
    control = ["--control", "exact", "--release", "0.18.1", "--env", f"0.18.1={env}"]
    for options in ([], ["--plugin", "stock"], control):
        done = bench("features", "eagle", "--out", str(tmp_path / "new"), *options)
        assert (done.exit_code, done.output.strip()) == (1, "eagle: wrong; it is late")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"features-eagle.json", "features-eagle-stock.json", "features-eagle-control-exact.json"}


@pytest.mark.parametrize("control", ["positions", "exact"])
def test_a_control_breaks_what_it_names(control: str, monkeypatch: pytest.MonkeyPatch):
    from vllm_async_spec.spec_decode import DeviceProgress

    pytest.importorskip("vllm")
    from vllm_async_spec.vllm_plugin.patches import optimistic_runner

    correct, needed_by = DeviceProgress.correct, optimistic_runner.needed_by
    monkeypatch.setattr(DeviceProgress, "correct", correct)  # put back after the test
    monkeypatch.setattr(optimistic_runner, "needed_by", needed_by)
    CONTROLS[control](None)
    assert (DeviceProgress.correct is correct) is (control != "positions")
    assert (optimistic_runner.needed_by is needed_by) is (control != "exact")
