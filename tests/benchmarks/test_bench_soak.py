"""Soaks: what is held to be the same, and that every request is judged."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_command import bench

from benchmarks import child
from benchmarks.arms import Arm, Plugin
from benchmarks.child import ChildError
from benchmarks.loads import Request
from benchmarks.runner_on_cpu import OTHER_ROWS
from benchmarks.shapes import find_shape
from benchmarks.soak.controls import FEATURE_CONTROLS, SOAK_CONTROLS, can_show
from benchmarks.soak.engine import CONTROLS, NEAR, NOTED, Expected, Verdict, expect, soak
from benchmarks.soak.run import SoakError, allowed, together
from benchmarks.soak.soaks import SOAKS, WHOLE_KEYS
from vllm_async_spec import kernels
from vllm_async_spec.attention import flashinfer
from vllm_async_spec.vllm_plugin.patches import steady_states
from vllm_async_spec.vllm_plugin.patches.carried_inputs import Carried

SAID = Expected([5, 6, 7], [{}, {"9": NEAR / 2, "8": 2 * NEAR}, {}])


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([5, 6, 7], ("same", 3, None)),
        ([5, 9, 1], ("swapped", 1, NEAR / 2)),
        ([5, 8, 7], ("different", 1, 2 * NEAR)),
        ([5, 4, 7], ("different", 1, None)),
        ([5, 6], ("different", 2, None)),
        ([5, 9], ("different", 2, None)),
        ([], ("different", 0, None)),
    ],
)
def test_only_a_swap_of_near_choices_is_forgiven(tokens: list[int], found: tuple[str, int, float | None]):
    assert SAID.compare(tokens) == found


def test_what_is_near_can_be_said():
    assert SAID.compare([5, 8, 7], 2 * NEAR) == ("swapped", 1, 2 * NEAR)
    assert SAID.compare([5, 4, 7], 2 * NEAR) == ("different", 1, None)
    verdict = Verdict(near=2 * NEAR)
    verdict.add(0, SAID, [5, 8, 7])
    assert verdict.outcomes["swapped"] == 1


def test_a_verdict_keeps_the_widest_swap_and_the_first_differences():
    verdict = Verdict()
    for index, tokens in enumerate(([5, 6, 7], [5, 9, 1], [5, 8, 7])):
        verdict.add(index, SAID, tokens)
    assert verdict.outcomes == {"same": 1, "swapped": 1, "different": 1}
    assert (verdict.tokens, verdict.widest_swap) == (9, NEAR / 2)
    assert verdict.first_different == [(2, 1, 2 * NEAR)]
    verdict.add(3, SAID, [5, 4, 7])
    assert {gap: count for gap, count in verdict.gaps.items() if count} == {"0.05": 1, "0.1": 1, "more": 1}


def noise(widest: float, different: int = 0) -> dict[str, Any]:
    return {"outcomes": {"different": different}, "widest_swap": widest, "gaps": {"0.1": 1}}


def test_the_subject_is_allowed_twice_what_stock_is_from_itself():
    assert allowed(noise(0.0)) == allowed(noise(NEAR / 2)) == NEAR
    assert allowed(noise(0.08)) == 0.16


@pytest.mark.parametrize("found", [noise(0.3), noise(0.01, different=1)])
def test_where_stock_is_far_from_itself_nothing_is_told(found: dict[str, Any]):
    with pytest.raises(
        SoakError, match=r"stock differs from itself by up to .* can't show whether the plugin is wrong"
    ):
        allowed(found)


def test_of_mla_stock_without_drafts_says_what_is_right():
    for each in SOAKS.values():
        assert each.undrafted is ("mla" in each.name)
        assert each.oracle.method is (None if each.undrafted else each.subject.method)
        assert each.oracle.plugin is Plugin.STOCK
        assert each.oracle.engine == each.subject.engine


def test_a_wide_soak_has_more_requests_than_the_shorter_account_needs():
    for release in ("0.24.0", "0.26.0"):
        wide = SOAKS[f"{release}-V1-FLASH_ATTN-wide"]
        assert wide.prepared == ("steady-states", OTHER_ROWS)  # or it has shown nothing of them
        load = wide.load
        assert load.running > 2 * steady_states._FEWEST  # also where requests have ended, and none has come yet
        assert load.requests > load.running


def test_a_wide_soak_of_flashinfer_has_more_requests_than_split_their_keys_on_hopper():
    wide, model = SOAKS["0.32.0-V2-FLASHINFER-wide"], find_shape("1b").target
    assert wide.prepared == (WHOLE_KEYS,)
    heads = model["num_attention_heads"], model["num_key_value_heads"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "_processors", lambda device: 132)
        assert not flashinfer.keys_are_split(wide.load.running - 3, 4, *heads, torch.device("cpu"))


def test_the_noise_is_measured_where_float16_does_not_bound_it():
    assert {name for name, each in SOAKS.items() if each.noisy and "mla" not in name} == {
        "0.26.0-V1-FLASH_ATTN-gpt-oss",
        "0.26.0-V1-FLASH_ATTN-hybrid",
        "tiny-hybrid",
    }


class FakeEngine:
    """Finishes the oldest request each step, with tokens that count from the prompt's last one."""

    def __init__(self, wrong: Callable[[str], bool] = lambda name: False) -> None:
        self.names: list[str] = []
        self.most = 0
        self._running: list[tuple[str, list[int]]] = []
        self._wrong = wrong

    def add_request(self, name: str, prompt: dict[str, list[int]], max_tokens: int) -> None:
        self.names.append(name)
        start = prompt["prompt_token_ids"][-1] + self._wrong(name)
        self._running.append((name, list(range(start + 1, start + 1 + max_tokens))))
        self.most = max(self.most, len(self._running))

    def step(self) -> list[Any]:
        name, tokens = self._running.pop(0)
        return [SimpleNamespace(finished=True, request_id=name, outputs=[SimpleNamespace(token_ids=tokens)])]


REQUESTS = [Request((1, number), max_tokens=3) for number in range(8)]
EXPECTED = [Expected([number + 1, number + 2, number + 3], [{}] * 3) for number in range(8)]


def soaked(engine: FakeEngine) -> Verdict:
    llm = SimpleNamespace(llm_engine=engine)
    return soak(llm, REQUESTS, EXPECTED, lambda max_tokens: max_tokens, running=4, seconds=0, seed=0)


def test_every_request_that_arrived_is_judged():
    engine = FakeEngine()
    verdict = soaked(engine)
    assert verdict.outcomes == {"same": len(engine.names), "swapped": 0, "different": 0}
    assert len(engine.names) == len(set(engine.names)) >= len(REQUESTS)
    assert engine.most == 4


def test_one_wrong_request_is_found():
    verdict = soaked(FakeEngine(wrong=lambda name: name == "soak-5"))
    assert verdict.outcomes["different"] == 1
    assert verdict.first_different[0][1:] == (0, None)


def test_what_stock_says_is_kept_with_the_choices_close_behind():
    def choice(logprob: float) -> Any:
        return SimpleNamespace(logprob=logprob)

    output = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=[{7: choice(-1.0), 3: choice(-1.1), 4: choice(-2.0)}, {8: choice(-0.5), 2: choice(-0.5)}],
    )

    def generate(prompts: Sequence[Any], sampling: Sequence[Any], use_tqdm: bool) -> list[Any]:
        assert prompts == [{"prompt_token_ids": [1, 2]}]
        assert sampling == [(2, 5)]
        return [SimpleNamespace(outputs=[output])]

    said = expect(SimpleNamespace(generate=generate), [Request((1, 2), 2)], lambda most, logprobs: (most, logprobs))
    assert said == [Expected([7, 8], [{"3": 0.1}, {"2": 0.0}])]


def test_each_control_is_one_of_the_engine_s_and_shows_somewhere():
    assert {*SOAK_CONTROLS, *FEATURE_CONTROLS} == CONTROLS.keys()
    shown = {control: {name for name in SOAKS if can_show(control, SOAKS[name].subject)} for control in SOAK_CONTROLS}
    flashinfer = {name for name in SOAKS if "FLASHINFER" in name}
    assert len(flashinfer) == 13
    on_the_device = {name for name in SOAKS if name.startswith(("0.24.0-V1", "0.26.0-V1"))}
    assert shown == {
        "lengths": flashinfer,
        "fence": flashinfer,
        "short": SOAKS.keys(),
        "short-last-rank": {name for name in SOAKS if name.endswith("-tp2")},
        "states": {"tiny-hybrid", "0.26.0-V1-FLASH_ATTN-hybrid"},
        "positions": {"0.18.1-V1-FLASH_ATTN", "0.18.1-V1-FLASH_ATTN-8b", "0.18.1-V1-FLASH_ATTN-tp2"},
        "carried": on_the_device,
        "moved": on_the_device,
        "kept": {"tiny-hybrid", "0.26.0-V1-FLASH_ATTN-hybrid"},
    }


def test_the_control_of_carried_inputs_gives_the_tokens_of_the_step_before(monkeypatch: pytest.MonkeyPatch):
    steps = iter([(0, 10), (1, 11), None, (2, 12), (3, 13)])

    def tokens_of(self: Carried, *_: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        step = next(steps)
        return None if step is None else (torch.tensor([step[0]]), torch.tensor([[step[1]]]))

    monkeypatch.setattr(Carried, "tokens_of", tokens_of)
    advanced: list[tuple[int, int]] = []
    monkeypatch.setattr(
        kernels, "advance_batch", lambda _, sampled, drafts, *__: advanced.append((int(sampled), int(drafts)))
    )
    CONTROLS["carried"](None)
    given: list[Any] = [Carried.tokens_of(carried, None, None, 1, None) for carried in [Carried(1)] * 5]
    assert [each and (each[0].item(), each[1].item()) for each in given] == [(0, 10), (0, 10), None, (2, 12), (2, 12)]
    for number in (4, 5):
        kernels.advance_batch(None, torch.tensor([[number, -1]]), torch.tensor([[10 + number]]), 1, None)  # type: ignore[arg-type]
    assert advanced == [(3, 13), (4, 14)]


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ((), "soak-tiny.json"),
        (("--plugin", "stock"), "soak-tiny-stock.json"),
        (("--control", "short"), "soak-tiny-control-short.json"),
    ],
)
def test_a_result_is_named_for_what_it_is_of(
    options: tuple[str, ...], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def run_soak(soak: Any, *, plugin: Plugin, control: str | None, **_: Any) -> Iterator[dict[str, Any]]:
        verdict = asdict(Verdict()) | {"seconds": 1.0, "delays": {}, "fallbacks": {}, "prepared": {}}
        yield {"plugin": plugin.value, "control": control} | verdict

    monkeypatch.setattr("benchmarks.cli.tokens.run_soak", run_soak)
    done = bench("soak", "tiny", "--out", str(tmp_path / "new"), *options)
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "new").iterdir()] == [file]
    assert f"written to {tmp_path / 'new' / file}" in done.output


LEGS: list[dict[str, Any]] = [
    {
        "outcomes": {"same": 90, "swapped": 6, "different": 0},
        "tokens": 500,
        "widest_swap": 0.04,
        "first_different": [],
        "gaps": {"0.05": 6, "more": 0},
        "seconds": 60.2,
        "delays": {"before build": 7},
        "fallbacks": {"a reason": 1},
        "prepared": {"steady-inputs": 5},
    },
    {
        "outcomes": {"same": 50, "swapped": 1, "different": 2},
        "tokens": 300,
        "widest_swap": 0.01,
        "first_different": [(3, 1, None), (4, 0, 0.2)],
        "gaps": {"0.05": 1, "more": 2},
        "seconds": 30.5,
        "delays": {"before build": 2, "after build": 1},
        "fallbacks": {"a reason": 4},
        "prepared": {"steady-inputs": 9, "steady-states": 2},
    },
]


def test_legs_of_a_soak_are_one_verdict():
    assert together(LEGS[:1]) == LEGS[0]
    assert together(LEGS) == {
        "outcomes": {"same": 140, "swapped": 7, "different": 2},
        "tokens": 800,
        "widest_swap": 0.04,
        "first_different": [(3, 1, None), (4, 0, 0.2)],
        "gaps": {"0.05": 7, "more": 2},
        "seconds": 90.7,
        "delays": {"before build": 9, "after build": 1},
        "fallbacks": {"a reason": 4},
        "prepared": {"steady-inputs": 9, "steady-states": 2},
    }


def test_what_was_seen_before_an_engine_dies_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    class Engine:
        def wait_until_ready(self) -> None: ...

        def ask(self, command: str, **given: Any) -> dict[str, Any]:
            if command != "soak":
                return {"requests": 96, "vllm": "0.32.0"}
            asked.append(given)
            if len(asked) == 3:
                raise ChildError("the engine of 'subject' failed: the process ended with exit code -9")
            return LEGS[0]

    @contextmanager
    def start(*_: Any, **__: Any) -> Iterator[Engine]:
        yield Engine()

    monkeypatch.setattr(child, "start", start)
    options = ("--seconds", "150", "--control", "short", "--out", str(tmp_path), "--cache", str(tmp_path / "cache"))
    done = bench("soak", "tiny", *options)
    assert done.exit_code == 1
    assert done.stderr.endswith("benchmarks: the engine of 'subject' failed: the process ended with exit code -9\n")
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert (found["outcomes"], found["seconds"]) == ({"same": 180, "swapped": 12, "different": 0}, 120.4)
    # The last leg takes the rest, each has delays of its own, and what is broken is broken once.
    assert [(each["seconds"], each["seed"], each["control"]) for each in asked] == [
        (60.0, 0, "short"),
        (60.0, 1, None),
        (pytest.approx(29.6), 2, None),
    ]


@pytest.mark.parametrize("widest", [0.1, 0.4])
def test_stock_without_drafts_is_soaked_before_the_subject_is(
    widest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, float | None]] = []

    @contextmanager
    def start(arm: Arm, *_: Any, **__: Any) -> Iterator[Any]:
        def ask(command: str, *, near: float | None = None, **_: Any) -> dict[str, Any]:
            asked.append((f"{command}, {arm.method.value if arm.method else 'no drafts'}", near))
            return LEGS[0] | {"widest_swap": widest, "requests": 16, "vllm": "0.32.0"}

        yield SimpleNamespace(wait_until_ready=lambda: None, ask=ask)

    monkeypatch.setattr(child, "start", start)
    done = bench("soak", "tiny-mla", "--seconds", "1", "--out", str(tmp_path))
    assert asked[:2] == [("expect, no drafts", None), ("soak, no drafts", NOTED)]
    if widest == 0.4:
        assert (done.exit_code, len(asked)) == (1, 2)
        assert "benchmarks: stock differs from itself by up to 0.400" in done.stderr
        return
    assert done.exit_code == 0, done.output
    assert asked[2:] == [("describe, mtp", None), ("soak, mtp", 0.2)]
    found = json.loads((tmp_path / "soak-tiny-mla.json").read_text())
    assert (found["near"], found["noise"]["widest_swap"]) == (0.2, 0.1)
