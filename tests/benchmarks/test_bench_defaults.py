"""vLLM's defaults in plans."""

import copy
import types
from typing import Any

import pytest
from bench_documents import FACTS, document

from benchmarks import runner
from benchmarks.engine import BenchEngine, empty_prefix_cache
from benchmarks.facts import EngineError
from benchmarks.plans import PLANS, find_plan
from benchmarks.plans.serving import SERVE_PLANS, find_serve_plan
from benchmarks.results import ResultFile
from benchmarks.runner import Runner
from benchmarks.starts import starts_grid

SIZES = {"dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len"}
CHOSEN = {"attention_backend", "enable_prefix_caching", "max_num_seqs"}
RANKS = {"tp2": {"tensor_parallel_size"}, "dp2": {"data_parallel_size", "enable_expert_parallel", "api_server_count"}}
"""Arguments of engines on two GPUs, by the end of the plan's name."""


@pytest.mark.parametrize("name", [*PLANS, *SERVE_PLANS])
def test_an_engine_on_a_gpu_is_vllms_default(name: str):
    plan = find_plan(name) if name in PLANS else find_serve_plan(name)
    for arm in plan.arms:
        if arm.needs_gpu:
            ranks = RANKS.get(name.rpartition("-")[2], set())
            kernels = {"gdn_prefill_backend"} if name.endswith("-triton") else set()
            graphs = {"max_cudagraph_capture_size"} if name.endswith("-graphs") else set()
            seed = {"seed"} if name.endswith("-0.18.1-tp2") else set()
            assert arm.engine.keys() <= SIZES | CHOSEN | ranks | kernels | graphs | seed, arm.name
            assert arm.gpus == (2 if ranks else 1)
            assert arm.engine["enable_prefix_caching"] is arm.engine["max_num_seqs"] is None


def test_two_data_parallel_engines_divide_experts_and_say_what_a_difference_of_tokens_tells():
    for name, release, runner_ in (("serve-moe-dp2", "0.32.0", "V2"), ("serve-moe-0.26.0-V1-dp2", "0.26.0", "V1")):
        plan = find_serve_plan(name)
        assert (
            "data parallel with experts divided on 2 ranks; experts round by batch, so tokens tell only" in plan.about
        )
        assert [arm.name for arm in plan.arms][:3] == ["stock", "noop", "plugin"]
        assert plan.audited == ("closed-32",)
        for arm in plan.arms:
            assert (arm.release, arm.runner, arm.shape, arm.gpus) == (release, runner_, "moe", 2)
            assert (arm.engine["data_parallel_size"], arm.engine["enable_expert_parallel"]) == (2, True)
            # 16 layers of 64 experts of three matrices of 768 x 2,048 are on one of the GPUs, the rest is on both.
            experts = 2 * 16 * 64 * 3 * 768 * 2048
            assert arm.gpu_weight_bytes == arm.weight_bytes - experts / 2
    dense = find_serve_plan("serve-8b-tp2")
    assert "tokens tell" not in dense.about
    assert dense.arms[0].gpu_weight_bytes == dense.arms[0].weight_bytes / 2


def test_every_row_that_is_published_has_its_plans():
    found = set()
    for name in PLANS:
        if name.startswith("defaults-"):
            plan = find_plan(name)
            assert [arm.name for arm in plan.arms][:3] == ["stock", "noop", "plugin"]
            backends = {arm.engine["attention_backend"] for arm in plan.arms}
            assert backends in ({"FLASHINFER", "FLASH_ATTN"}, {"FLASH_ATTN"})
            arm = plan.arms[0]
            found |= {
                (arm.release, arm.runner, arm.shape, max(backends), arm.draft_tokens, load.name) for load in plan.loads
            }
    for release, runner_, shape, backend in (
        ("0.32.0", "V2", "8b", "FLASH_ATTN"),
        ("0.26.0", "V2", "8b", "FLASH_ATTN"),
        ("0.26.0", "V1", "8b", "FLASH_ATTN"),
        ("0.18.1", "V1", "8b", "FLASH_ATTN"),
        ("0.18.1", "V1", "1b", "FLASH_ATTN"),
        ("0.24.0", "V1", "1b", "FLASH_ATTN"),
    ):
        for drafts in (1, 3, 5, 7):
            assert {(release, runner_, shape, backend, drafts, f"decode-{batch}") for batch in (1, 32, 128)} <= found
        for load in ("decode-8", "mixed", "context-1k", "context-8k", "context-32k"):
            assert (release, runner_, shape, backend, 3, load) in found
    larger = {name.removeprefix("defaults-") for name in PLANS if name.endswith("-graphs")}
    assert larger == {f"{name}-K7-graphs" for name in ("8b", "1b", "8b-0.26.0-V2", "8b-0.26.0-V1")} | {
        f"{name}-K5-graphs" for name in ("8b-0.18.1", "1b-0.18.1", "1b-0.24.0")
    }
    for arm in (arm for name in larger for arm in find_plan(f"defaults-{name}").arms):
        assert arm.engine["max_cudagraph_capture_size"] >= 128 * (1 + arm.draft_tokens) > 512
    served = {find_serve_plan(name).arms[0].release for name in SERVE_PLANS}
    assert served == {None, "0.32.0", "0.26.0", "0.24.0", "0.18.1"}


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("defaults-8b")])
def test_a_cache_holds_what_its_loads_run_at_once(name: str):
    plan = find_plan(name)
    token = 33 * 2 * 2 * 8 * 128  # bytes: layers and the drafter's, keys and values, bfloat16, KV heads, their size
    needed = max(load.running * (load.longest + 16 + plan.arms[0].draft_tokens) for load in plan.loads)
    assert plan.arms[0].engine["kv_cache_memory_bytes"] > token * needed


@pytest.mark.parametrize(("gigabytes", "fits"), [(85.5, False), (150.7, True)])
@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("defaults-8b", "4 engines side by side need about 119 GB"),
        ("v1-hybrid-0.26.0-triton", "3 engines side by side need about 86 GB"),
    ],
)
def test_engines_side_by_side_fit_on_an_h200_and_not_on_an_h100(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, needed: str, gigabytes: float, fits: bool
):
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(runner, "installed_vllm", lambda: find_plan(name).arms[0].release)
    monkeypatch.setattr(runner, "gpu_bytes", lambda: gigabytes * 1e9)
    plan = find_plan(name)
    chosen = Runner(plan, ResultFile(tmp_path / "r.json", plan), command="", envs={}, cache=tmp_path)
    why = chosen.lacks(plan.arms)
    assert (why is None) is fits
    if not fits:
        assert why == (
            f"{needed}, and the GPU has {gigabytes} GB; give --one-by-one, or --only with fewer arms, or run it on a "
            "larger GPU"
        )
        assert chosen.lacks(plan.arms[:2]) is None


class FakeLlm:
    def __init__(self, ahead: int) -> None:
        self.ahead, self.stepped = ahead, 0
        caching = types.SimpleNamespace(enable_prefix_caching=True)
        self.llm_engine = types.SimpleNamespace(
            step=self._step, vllm_config=types.SimpleNamespace(cache_config=caching)
        )

    def _step(self) -> None:
        self.ahead, self.stepped = self.ahead - 1, self.stepped + 1

    def reset_prefix_cache(self) -> bool:
        return self.ahead <= 0


def test_the_prefix_cache_is_empty_before_each_run():
    llm = FakeLlm(ahead=1)
    assert empty_prefix_cache(llm)
    assert llm.stepped == 1
    assert not empty_prefix_cache(FakeLlm(ahead=100))
    engine = object.__new__(BenchEngine)
    engine._llm = FakeLlm(ahead=100)
    with pytest.raises(EngineError, match="vLLM does not empty its prefix cache"):
        engine._forget_prompts()
    engine._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching = False
    engine._forget_prompts()


def test_starts_are_told_by_caches_and_compared_where_they_are_alike():
    served = {
        "served": 1,
        "plan": {"reference": "stock", "arms": [{"name": "stock"}, {"name": "plugin"}, {"name": "not run"}]},
        "sessions": [],
        "starts": [
            {"arm": "stock", "seconds": 110.4, "caches": "cold", "beside": 1},
            {"arm": "plugin", "seconds": 61.5, "caches": "shared", "beside": 2},
            *({"arm": "stock", "seconds": took, "caches": "warm", "beside": 1} for took in (40.0, 42.0)),
            {"arm": "plugin", "seconds": 43.5, "caches": "warm", "beside": 1},
            {"arm": "plugin", "seconds": 90.0, "caches": "warm", "beside": 3},
        ],
    }
    run = document({"stock": [1, 1], "plugin": [1, 1]}, facts=FACTS | {"start_seconds": 12.0, "caches": "warm"})
    alone = copy.deepcopy(run)
    run["plan"]["keep"] = True
    older = document({"stock": [1, 1]}, facts=FACTS | {"start_seconds": 12.0})
    found = starts_grid({"serve-8b": served, "defaults-8b": run, "starts-8b": alone, "older": older})
    assert [[*row] for row in found.rows] == [
        ["serve-8b", "warm", "1", "41 (40-42, n = 2)", "-", "44", "-", "+2.5 s"],
        ["serve-8b", "warm", "3", "-", "-", "90", "-", "-"],
        ["defaults-8b", "warm", "1", "12", "-", "12", "-", "+0.0 s"],  # one process for two turns
        ["starts-8b", "warm", "1", "12 (12-12, n = 2)", "-", "12 (12-12, n = 2)", "-", "+0.0 s"],  # one for each
        ["serve-8b", "warmed by another arm", "2", "-", "-", "62", "-", "-"],
        ["serve-8b", "cold", "1", "110", "-", "-", "-", "-"],
    ]
