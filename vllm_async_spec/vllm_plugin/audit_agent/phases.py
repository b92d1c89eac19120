"""Maps vLLM's functions to phases of a step, for the V1 and V2 runners, and follows runners on a CPU.

Functions are found by name in the running engine. If a release lacks a function, its time counts towards the function
around it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.audit.cpu_waits import AuditedCpuEvent, CpuWaits
from vllm_async_spec.audit.report import Phase
from vllm_async_spec.audit.spans import Watch

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import EngineCore, ModelRunner

SCHEDULER = {
    "schedule": Phase.SCHEDULING,
    "get_grammar_bitmask": Phase.SCHEDULING,
    "update_from_output": Phase.OUTPUT,
}
STEP = ("execute_model", "sample_tokens", "take_draft_token_ids")
_V1 = {
    Phase.OTHER: STEP,
    Phase.INPUTS: (
        "_update_states",
        "_get_valid_sampled_token_count",
        "_prepare_inputs",
        "_calc_spec_decode_metadata",
        "_determine_batch_execution_and_padding",
        "_get_slot_mappings",
        "_preprocess",
    ),
    Phase.METADATA: ("_build_attention_metadata",),
    Phase.LAUNCH: ("_model_forward",),
    Phase.SAMPLING: ("_sample", "_update_states_after_model_execute"),
    Phase.DRAFTING: (
        "propose_draft_token_ids",
        "_copy_draft_token_ids_to_cpu",
        "_copy_valid_sampled_token_count",
    ),
    Phase.OUTPUT: ("_bookkeeping_sync", "_get_draft_token_ids_cpu"),
}
_V2 = {
    Phase.INPUTS: (
        "finish_requests",
        "free_states",
        "add_requests",
        "update_requests",
        "gather_batch_req_state",
        "prepare_inputs",
    ),
    Phase.METADATA: ("prepare_attn",),
    Phase.SAMPLING: ("sample", "postprocess", "postprocess_sampled"),
}
RUNNER = {name: phase for runner in (_V1, _V2) for phase, names in runner.items() for name in names}
PARTS = {
    "drafter": {"propose": Phase.DRAFTING},
    "speculator": {"propose": Phase.DRAFTING},
    "model_state": {"prepare_attn": Phase.METADATA, "prepare_inputs": Phase.INPUTS},
    "cudagraph_manager": {"run_fullgraph": Phase.LAUNCH, "run_pw_graph": Phase.LAUNCH},
    "draft_tokens_handler": {"get_draft_tokens": Phase.OUTPUT, "set_draft_tokens": Phase.DRAFTING},
}
AGREEMENT = {
    "vllm.v1.worker.dp_utils": "_synchronize_dp_ranks",
    "vllm.v1.worker.gpu.dp_utils": "sync_cudagraph_and_dp_padding",
}
"""By module. V1 asks once for the target and up to twice for the drafter; V2 from 0.31 on once."""
BUILDER = dict.fromkeys(("build", "build_for_drafting", "build_for_cudagraph_capture"), Phase.METADATA)


def watch_engine_core(watch: Watch, core: EngineCore) -> None:
    """Watch the scheduler of an `EngineCore`."""
    for name, phase in SCHEDULER.items():
        watch.watch(type(core.scheduler), name, phase)


def watch_runner(watch: Watch, runner: ModelRunner, cpu: CpuWaits | None) -> None:
    """Watch a V1 or V2 runner and the functions that it calls in a step; without a device `cpu` follows its tensors."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    for name, phase in RUNNER.items():
        watch.watch(type(runner), name, phase, around=cpu.following if cpu and name in STEP else None)
    for part, functions in PARTS.items():
        for name, phase in functions.items():
            watch.watch(type(getattr(runner, part, None)), name, phase)
    for module, name in AGREEMENT.items():
        watch.watch(sys.modules.get(module), name, Phase.AGREEMENT)
    if not hasattr(runner, "_model_forward"):
        watch.watch(type(runner.model), "forward", Phase.LAUNCH)
    watch.watch(type(runner.model), "compute_logits", Phase.SAMPLING)
    for builder in builder_classes():
        for name, phase in BUILDER.items():
            watch.watch(builder, name, phase, around=functools.partial(_given, cpu) if cpu else None)
    for output in _below(AsyncModelRunnerOutput):
        watch.watch(output, "get_output", Phase.OUTPUT, around=cpu.following if cpu else None)
    if cpu is not None:
        _follow(cpu, runner)


def builder_classes() -> list[type]:
    """Every class of this process that builds attention metadata."""
    try:
        from vllm.v1.attention.backend import AttentionMetadataBuilder
    except ImportError:  # up to 0.13
        from vllm.v1.attention.backends.utils import AttentionMetadataBuilder
    return _below(AttentionMetadataBuilder)


def _below(base: type) -> list[type]:
    found: list[type] = list(base.__subclasses__())
    for cls in found:  # the loop appends to `found`
        found.extend(set(cls.__subclasses__()).difference(found))
    return found


def _follow(cpu: CpuWaits, runner: ModelRunner) -> None:
    """Treat the forward's results as the device's, and record the runner's events."""
    seam = "_model_forward" if hasattr(runner, "_model_forward") else "execute_model"
    forward = getattr(runner, seam)
    cpu.replace(runner, seam, lambda *args, **kwargs: cpu.forward(lambda: forward(*args, **kwargs)))
    for owner in (torch, torch.cuda):  # vLLM has put its own stand-ins here
        cpu.replace(owner, "Event", AuditedCpuEvent)
    for value in list(vars(runner).values()):
        if type(value).__name__ == "_EventPlaceholder":
            cpu.adopt(value)


@contextlib.contextmanager
def _given(cpu: CpuWaits, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Treat a builder's arguments as device tensors if they would be on the device with a GPU."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "seq_lens") and hasattr(value, "query_start_loc_cpu"):
            held = vars(value)
            hosts = (value.query_start_loc_cpu, held.get("_seq_lens_cpu"), held.get("seq_lens_cpu_upper_bound"))
            for tensor in (value.seq_lens, value.block_table_tensor, value.slot_mapping):
                cpu.on_device(tensor, unless=hosts)
    with cpu.following():
        yield
