"""The soak of the V1 runner on a CPU: what it asks for, and that a patch which prepared no step is no success."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_command import bench

from benchmarks import child, runner_on_cpu
from benchmarks.arms import Arm, Plugin
from benchmarks.cli import tokens
from benchmarks.soak import steps
from benchmarks.soak.soaks import SOAKS
from vllm_async_spec.vllm_plugin.patches import implementations, optimistic_runner
from vllm_async_spec.vllm_plugin.patches.carried_inputs import Carried

SOAK = SOAKS["0.26.0-V1-CPU_ATTN"]


@pytest.mark.parametrize(("environment", "asked"), [(runner_on_cpu.ENVIRONMENT, True), ({}, False)])
def test_the_patches_apply_on_a_cpu_if_the_environment_says_so(
    environment: dict[str, str], asked: bool, monkeypatch: pytest.MonkeyPatch
):
    registry = dict(implementations.IMPLEMENTATIONS)
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", registry)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    runner_on_cpu.choose()
    for name in runner_on_cpu.PATCHES:
        before = implementations.PATCHES[name.replace("-", "_")].IMPLEMENTATIONS[name]
        assert before.unneeded is optimistic_runner.unneeded  # "the platform is not CUDA"
        assert registry[name].apply is before.apply
        assert (registry[name].unneeded is not before.unneeded) is asked


def test_it_is_stock_that_schedules_alike_without_the_patches():
    assert runner_on_cpu.ENVIRONMENT.items() <= SOAK.subject.environment.items()
    assert (SOAK.oracle.plugin, SOAK.oracle.release, SOAK.oracle.runner) == (Plugin.STOCK, "0.26.0", "V1")
    assert SOAK.subject.engine["async_scheduling"]
    assert not SOAK.subject.needs_gpu


def test_steps_that_a_patch_leaves_to_vllm_do_not_count(monkeypatch: pytest.MonkeyPatch):
    made = iter([None, "tokens", "tokens"])
    monkeypatch.setattr(Carried, "tokens_of", lambda *_: next(made))
    monkeypatch.setattr(steps, "_METHODS", {"carried-inputs": (Carried, "tokens_of")})
    monkeypatch.setattr(steps, "_counting", [])
    monkeypatch.setattr(steps, "_counts", type(steps._counts)())
    for _ in range(2):
        steps.count()  # the second time changes nothing
    carried: Any = Carried(1)
    assert (carried.tokens_of(None, None, 1, None), steps.counts()) == (None, {})
    assert [carried.tokens_of(None, None, 1, None) for _ in range(2)] == ["tokens", "tokens"]
    assert steps.counts() == {"carried-inputs": 2}


@pytest.mark.parametrize(
    ("prepared", "sentence"),
    [
        (dict.fromkeys((*runner_on_cpu.PATCHES, runner_on_cpu.OTHER_ROWS), 3), ""),
        (
            {"carried-inputs": 3},
            "benchmarks: no step was prepared by steady-inputs, steady-states, steady-inputs of other rows, so this "
            "soak shows nothing of it; see the engine's log\n",
        ),
    ],
)
def test_a_soak_in_which_a_patch_prepared_no_step_fails(
    prepared: dict[str, int], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leg = {"outcomes": {"same": 1, "swapped": 0, "different": 0}, "tokens": 5, "widest_swap": 0.0, "seconds": 2.0}
    leg |= {"first_different": [], "gaps": {}, "delays": {}, "fallbacks": {}, "prepared": prepared}

    @contextmanager
    def start(arm: Arm, *_: Any, **__: Any) -> Any:
        yield SimpleNamespace(
            wait_until_ready=lambda: None, ask=lambda *_, **__: leg | {"requests": 72, "vllm": "0.26.0"}
        )

    monkeypatch.setattr(child, "start", start)
    monkeypatch.setattr(tokens, "find_environments", lambda *_: {})
    done = bench("soak", SOAK.name, "--seconds", "1", "--cache", str(tmp_path))
    assert (done.exit_code, done.stderr.endswith(sentence)) == (1 if sentence else 0, True)
    assert f"steps by patch {prepared}" in done.stdout
