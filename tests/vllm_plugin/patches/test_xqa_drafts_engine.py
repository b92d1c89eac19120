"""Draft steps with XQA that one CUDA graph replays, in real engines: `-m gpu`, with vLLM 0.28 or later on Hopper."""

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import found_by, python_path

from benchmarks import child
from benchmarks.soak.soaks import SOAKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ARM = replace(SOAKS["0.32.0-V2-FLASHINFER"].subject, release=None, acceptance=None)

CHANGED = {
    "one graph": "",
    "a graph for each step": "flashinfer_builder._drafts_by_single_tokens = lambda config: False",
    "lengths of the first step": """
build, kept = flashinfer_builder.PlansFromBound.build, []

def stale(self, common_prefix_len, common_attn_metadata, fast_build=False):
    built = build(self, common_prefix_len, common_attn_metadata, fast_build)
    if common_attn_metadata.max_query_len == 1:
        built.decode.seq_lens = built.decode.seq_lens.clone()
        kept.append(built.decode.seq_lens)  # graphs read it
    return built

flashinfer_builder.PlansFromBound.build = stale
""",
}
"""How the draft steps are made, and what changes the plugin so; the last is wrong."""

SERVE = """
import hashlib, json, sys
from dataclasses import asdict
import torch
from benchmarks.engine import BenchEngine
from benchmarks.loads import Load
loads = [Load(f"{running} at once", 2 * running + 10, running, (16, 300), (100, 160)) for running in (1, 12)]
engine = BenchEngine({"arm": json.loads(sys.argv[1]), "loads": [asdict(load) for load in loads], "models": sys.argv[2]})
runner = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
speculator, said = runner.speculator, []
source = torch.Generator("cuda").manual_seed(7)
with torch.inference_mode():
    for name, weight in speculator.model.named_parameters():
        if "layers" in name and weight.ndim == 2:
            weight.normal_(0, weight.shape[1] ** -0.5, generator=source)
propose = speculator.propose

def noted(*args, **more):
    drafts = propose(*args, **more)
    said.append(drafts.clone())
    return drafts

speculator.propose = noted
fused = getattr(speculator, "use_fused_multi_step_decode", None)  # up to 0.31
found = {"one graph": speculator.supports_decode_metadata_update if fused is None else fused}
for load in loads:
    said.clear()
    engine.measure(load.name, 0, 1)
    drafts = [each.tolist() for each in said]
    found[load.name] = [len(drafts), hashlib.sha256(str(drafts).encode()).hexdigest()]
print("FOUND " + json.dumps(found))
"""
"""Attention of drawn weights decides the drafts, which dummy weights are too small for. The target accepts none, so
all engines serve the same batches."""


def test_one_graph_of_all_draft_steps_makes_the_drafts_of_a_graph_for_each(tmp_path: Path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("XQA ran on Hopper only")
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    if not hasattr(AttentionMetadataBuilder, "supports_draft_decode_metadata_update"):
        pytest.skip("this vLLM replays a graph for each draft step")
    found = {how: _served(code, tmp_path) for how, code in CHANGED.items()}
    one, each, stale = (found[how] for how in CHANGED)
    assert one.pop("one graph") is stale.pop("one graph") is True
    assert each.pop("one graph") is False
    assert all(batches > 500 for batches, _ in one.values())
    assert one == each
    for load in one:
        assert stale[load] != one[load], load


def _served(code: str, folder: Path) -> dict[str, Any]:
    """Whether one graph replays all draft steps, and by load the number of batches with drafts and a hash of these."""
    environment = child.environment(ARM, os.environ) | {"PYTHONPATH": python_path(Path(__file__).parents[3])}
    program = f"from vllm_async_spec.vllm_plugin.patches import flashinfer_builder\n{code}\n{SERVE}"
    command = [sys.executable, "-c", program, json.dumps(ARM.to_dict()), str(folder)]
    found: dict[str, Any] = found_by("drafts with XQA", command, environment)
    return found
