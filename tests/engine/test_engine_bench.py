"""The benchmarks' own engine on vLLM's CPU platform: is a draft accepted as often as the arm asks?"""

from pathlib import Path

import pytest
from bench_walk import as_steps, walk

from benchmarks import child
from benchmarks.acceptance import make_orbit
from benchmarks.arms import Acceptance, Arm, Plugin, expected_length
from benchmarks.loads import Load, make_requests
from benchmarks.plans.engines import CPU_ENGINE, CPU_ENVIRONMENT
from benchmarks.shapes import Method, find_shape
from benchmarks.soak.run import run_soak
from benchmarks.soak.soaks import find_soak
from benchmarks.timing import time_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("cpu_platform")]

LOAD = Load("decode", requests=16, running=16, prompt=(8, 8), output=(160, 160))
VOCABULARY = find_shape("tiny").target["vocab_size"]  # the same for all


@pytest.mark.parametrize(
    ("shape", "method", "share", "draft_tokens", "plugin"),
    [
        ("tiny", Method.EAGLE, 0.7, 3, Plugin.ON),
        ("tiny", Method.DRAFT_MODEL, 0.0, 2, Plugin.NOOP),
        ("tiny", Method.DRAFT_MODEL, 0.5, 1, Plugin.STOCK),
        ("tiny", Method.DRAFT_MODEL, 0.9, 5, Plugin.ON),
        ("tiny", Method.EAGLE, 1.0, 3, Plugin.NOOP),
        ("tiny-moe", Method.EAGLE, 0.7, 3, Plugin.ON),
        ("tiny-mla", Method.MTP, 0.7, 3, Plugin.ON),
    ],
)
def test_drafts_are_accepted_as_often_as_asked(
    tmp_path: Path, shape: str, method: Method, share: float, draft_tokens: int, plugin: Plugin
):
    arm = Arm(
        "arm",
        shape,
        plugin=plugin,
        method=method,
        draft_tokens=draft_tokens,
        acceptance=Acceptance(share),
        engine=CPU_ENGINE,
        environment=CPU_ENVIRONMENT,
    )
    with child.start(arm, [LOAD], audit=False, env=None, models=tmp_path, log=tmp_path / "log") as engine:
        engine.wait_until_ready()
        facts = engine.ask("describe")
        measured = engine.ask("measure", load=LOAD.name, seconds=0, repetitions=2)

    assert facts["async_scheduling"] is (plugin is Plugin.ON)
    orbit = make_orbit(VOCABULARY, share)
    starts = [request.prompt[-1] for request in make_requests(LOAD, VOCABULARY)]
    foreseen = time_run(LOAD, 0.0, as_steps([walk(orbit, LOAD.output[0], draft_tokens, start) for start in starts]))
    assert measured["acceptance_length"] == pytest.approx(foreseen.acceptance_length, abs=1e-9)
    assert measured["acceptance_length"] == pytest.approx(expected_length(share, draft_tokens), rel=0.06)


@pytest.mark.parametrize(
    ("name", "plugin", "control"),
    [
        ("tiny", Plugin.ON, None),
        ("tiny", Plugin.ON, "short"),
        ("tiny-gpt-oss", Plugin.ON, None),
        ("tiny-gpt-oss", Plugin.ON, "short"),
        ("tiny-hybrid", Plugin.ON, None),
        ("tiny-hybrid", Plugin.ON, "states"),
        ("tiny-mla", Plugin.ON, None),
        ("tiny-mla", Plugin.ON, "short"),
        ("tiny-mla", Plugin.NOOP, None),
    ],
)
def test_a_soak_finds_the_plugins_tokens_to_be_stocks_and_a_broken_engines_not(
    tmp_path: Path, name: str, plugin: Plugin, control: str | None
):
    """Broken on purpose, or stock where it is wrong: what MLA's prefill path attends to with drafts."""
    *_, found = run_soak(
        find_soak(name),
        plugin=plugin,
        seconds=1,
        seed=3,
        control=control,
        envs={},
        cache=tmp_path,
        report=lambda line: None,
    )
    outcomes = found["outcomes"]
    assert sum(outcomes.values()) >= 16
    assert found["facts"]["async_scheduling"]
    assert found["plugin"] == plugin.value
    if control and name == "tiny":
        assert outcomes["different"] == sum(outcomes.values()), found
    elif control:
        assert outcomes["different"] > sum(outcomes.values()) / 4, found  # a prompt alone is right, and so is luck
    elif plugin is Plugin.ON:
        assert outcomes["different"] == 0, found
    else:
        assert outcomes["different"] > 3, found
