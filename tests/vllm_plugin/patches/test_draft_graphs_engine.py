"""Drafting that is replayed in a real engine, batch by batch: `-m gpu`, with vLLM 0.14 to 0.29 installed."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import found_by, python_path

from vllm_async_spec.vllm_plugin.ledger import find_patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

DRAFT_MODEL = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_async_spec.demo.train import PROMPTS
target, draft, compilation = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model=target, speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 3},
          async_scheduling=True, max_model_len=256, max_num_seqs=24, dtype="float16", seed=0,
          gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30, **compilation)
asked = [SamplingParams(temperature=0, max_tokens=8 + 5 * number, ignore_eos=True) for number in range(len(PROMPTS))]

def serve():
    llm.generate(PROMPTS, asked)
"""
"""All prompts arrive at once, and end one by one."""

EAGLE = """
import json, sys
from dataclasses import asdict
from benchmarks.arms import Arm, Plugin
from benchmarks.engine import BenchEngine
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ATTENTIVE, BESIDE_OTHERS
options = {"dtype": "float16", "attention_backend": "FLASH_ATTN"} | json.loads(sys.argv[3])
arm = Arm("subject", "1b", plugin=Plugin.ON, runner="V1", acceptance=ATTENTIVE, engine=BESIDE_OTHERS | options)
loads = find_loads(["mixed-short"])
engine = BenchEngine({"arm": arm.to_dict(), "loads": [asdict(load) for load in loads], "models": sys.argv[1]})
llm = engine._llm

def serve():
    engine.measure("mixed-short", 0, 2)
"""
"""Prompts arrive among decodes."""

BOTH_WAYS = """
import copy
from vllm_async_spec.vllm_plugin.patches import draft_graphs
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
drafter = runner.drafter
reason = draft_graphs.refused(runner)
replay, launch, pairs, rows, split = drafter.propose, type(drafter).propose, [], [], []
captured = "propose" in vars(drafter)
has_rest = captured and replay.__self__.has_rest

def both(**given):
    metadata = given["common_attn_metadata"]
    kept = copy.copy(metadata)
    kept.seq_lens = metadata.seq_lens.clone()
    count = metadata.num_reqs
    uniform = metadata.num_actual_tokens == 4 * count and given["num_rejected_tokens_gpu"] is not None
    replayed = replay(**given)
    if uniform or has_rest:
        launched = launch(drafter, **(given | {"common_attn_metadata": kept}))
        pairs.append((replayed.clone(), launched.clone()))
        (rows if uniform else split).append(count)
    return replayed

drafter.propose = both
serve()
drafts = sum(one.numel() for one, _ in pairs)
same = sum(int((one == two).sum()) for one, two in pairs)
print("FOUND " + json.dumps({"refused": reason, "captured": captured, "drafts": drafts, "same": same,
                             "rows": sorted(set(rows)), "split": sorted(set(split))}))
"""


PLAIN = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["plain", "compiled by vLLM"])
@pytest.mark.parametrize("drafter", [DRAFT_MODEL, EAGLE], ids=["draft model", "EAGLE"])
def test_replayed_drafts_are_those_that_are_launched(
    gpu_models: Any, tmp_path: Path, drafter: str, options: dict[str, Any]
):
    """In one engine, batch by batch, with rows that are filled up as requests end."""
    vllm: Any = importlib.import_module("vllm")
    if not find_patch("draft-graphs").covers(vllm.__version__):
        pytest.skip(f"the patch draft-graphs is not for vLLM {vllm.__version__}")
    environment = os.environ | {"VLLM_ASYNC_SPEC": "auto", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # drafting of the V2 runner is captured by vLLM
    environment["PYTHONPATH"] = python_path(Path(__file__).parents[3])
    command = [
        sys.executable,
        "-c",
        drafter + BOTH_WAYS,
        str(gpu_models.target if drafter is DRAFT_MODEL else tmp_path),
        str(gpu_models.draft),
        json.dumps(options),
    ]
    found = found_by("both ways", command, environment)
    print(found)
    assert found["refused"] is None
    assert found["captured"]
    # 3 and 5 are filled up; at most four requests of the mixed load run at once
    assert ({1, 3, 5} if drafter is DRAFT_MODEL else {1, 3}) <= set(found["rows"])
    assert bool(found["split"]) == (drafter is EAGLE)
    assert found["drafts"] > 300
    # Lengths are bounds in a graph, by which attention may add up in another order: a near tie may go the other way.
    assert found["same"] >= 0.99 * found["drafts"]
