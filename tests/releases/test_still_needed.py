"""A patch's entry names the releases that need it, as the bytecode and source of this release say."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import fake_flashinfer
import pytest

from vllm_async_spec.vllm_plugin.ledger import load_ledger
from vllm_async_spec.vllm_plugin.ledger.targets import defines, resolve
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

_UTILS = "vllm.v1.attention.backends.utils"


def _names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.unwrap(function).__code__.co_names)


def _locals(function: Any) -> tuple[str, ...]:
    return tuple(inspect.unwrap(function).__code__.co_varnames)


def _globals(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = inspect.unwrap(function).__globals__
    return found


def _of(module: str, qualname: str) -> Any:
    return resolve(importlib.import_module(module), qualname)


def _waits_at_the_top(method: Any) -> bool:
    runner = _globals(method)["GPUModelRunner"]
    carried = hasattr(runner, "_compute_prev_positions")
    return not carried and "num_rejected_tokens_gpu" in _locals(runner.propose_draft_token_ids)


def _turns_draft_models_on_when_asked_only(create_engine_config: Any) -> bool:
    names = _globals(create_engine_config)
    if names["EngineArgs"].async_scheduling is False:
        return True
    # vLLM lists the methods that it accepts, then those that it turns on by itself; from 0.33 on one list before both.
    listed, _, source = inspect.getsource(names["VllmConfig"].__post_init__).partition(".async_scheduling:")
    accepts, _, by_itself = source.partition(".async_scheduling is None:")
    return '"draft_model"' in accepts and '"draft_model"' not in listed + by_itself


def _unpadded_drops_or_reads(unpadded: Any) -> bool:
    fields, names = _globals(unpadded)["CommonAttentionMetadata"].__dataclass_fields__, _names(unpadded)
    return "seq_lens_cpu" in names or ("seq_lens_cpu_upper_bound" in fields and "seq_lens_cpu_upper_bound" not in names)


def _counts_placeholders(update_async_output_token_ids: Any) -> bool:
    processor = _of("vllm.v1.sample.logits_processor.builtin", "MinTokensLogitsProcessor")
    return hasattr(processor, "apply_with_spec_decode") and "end_index" not in _locals(update_async_output_token_ids)


def _requires_host_lengths(cls: Any) -> bool:
    field = cls.__dataclass_fields__.get("seq_lens_cpu")
    return field is not None and not isinstance(vars(cls).get("seq_lens_cpu"), property)


def _fast_prefill_copies(function: Any) -> bool:
    made = inspect.unwrap(_of(_UTILS, "make_kv_sharing_fast_prefill_common_attn_metadata"))
    return "cpu" in made.__code__.co_consts


def _cuts_on_the_host(function: Any) -> bool:
    return not {"seq_lens_cpu", "cpu"}.isdisjoint(_names(_of(_UTILS, "make_local_attention_virtual_batches")))


def _takes_the_bound(builder: Any) -> bool:
    return "seq_lens_cpu_upper_bound" in _names(builder.build)


def _decodes_by_shape(determine: Any) -> bool:
    asked = getattr(_globals(determine)["GPUModelRunner"], "_is_uniform_decode", determine)
    return not [name for name in (*_names(asked), *_locals(asked)) if "prompt" in name or "prefill" in name]


FAULTS: dict[str, Callable[[Any], bool]] = {
    "async-scheduling-default": _turns_draft_models_on_when_asked_only,
    "async-scheduling-unset": lambda add: _globals(add)["EngineArgs"].async_scheduling is False,
    "context-parallel-lengths": lambda build: {"get_dcp_local_seq_lens", "optimistic_seq_lens_cpu"} <= {*_names(build)},
    "draft-lengths": lambda propose: (
        "num_rejected_tokens_gpu" not in _locals(propose) and "last_token_indices" in _locals(propose)
    ),
    "drafter-agreement": lambda determine: "coordinate_batch_across_dp" in _names(determine),
    "fast-prefill-counts": _fast_prefill_copies,
    "fast-prefill-counts-v2": lambda build: (
        "fast_prefill" in inspect.signature(build).parameters and _fast_prefill_copies(build)
    ),
    "fast-prefill-offsets": _fast_prefill_copies,
    "flashinfer-builder": lambda builder: (
        "seq_lens_cpu_upper_bound"
        in vars(sys.modules[builder.__module__])["CommonAttentionMetadata"].__dataclass_fields__
    ),
    "flashinfer-xqa": lambda supports: "is_prefill" in inspect.signature(supports).parameters,
    "lazy-outputs": lambda init: "async_output_thread" in _names(init),
    "metadata-counted-host-lengths": lambda cls: isinstance(vars(cls).get("seq_lens_cpu"), property),
    "metadata-micro-batches": lambda make: (
        "seq_lens_cpu_upper_bound" not in _globals(make)["CommonAttentionMetadata"].__dataclass_fields__
    ),
    "metadata-optional-host-lengths": _requires_host_lengths,
    "metadata-restored-host-lengths": lambda cls: "seq_lens_cpu" not in {*vars(cls), *cls.__dataclass_fields__},
    "metadata-unpadded": _unpadded_drops_or_reads,
    "min-tokens": _counts_placeholders,
    "mla-prefill-lengths": _takes_the_bound,
    "mla-prefill-lengths-sparse": _takes_the_bound,
    "optimistic-runner": _waits_at_the_top,
    "prompt-ends": _decodes_by_shape,
    "top-k-bound": lambda make: (
        "apply_top_k_only" in _names(_of("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p"))
    ),
    "virtual-batches-cut": _cuts_on_the_host,
    "virtual-batches-taken": _cuts_on_the_host,
}
"""Whether a release has the fault that a patch mends, told by the first target that exists."""
NOT_TOLD_BY_CODE = {
    "async-scheduling-cpu": "its entry names the CPU builds that were tried",
    "cpu-sampling": "the same",
    "cpu-sampling-top-k": "the same",
    "async-scheduling-decision": "no vLLM tells who decided",
    "carried-inputs": "the V1 runner has the fault to this day; the entry ends where no model has it by default",
    "draft-graphs": "the same",
    "steady-inputs": "the same",
    "steady-states": "the same",
    "linear-attention": "every V1 runner builds it anew; before 0.18 the builder is another",
    "engine-report": "no vLLM tells which attention backends it uses",
    "prometheus-registry": "no vLLM has these metrics",
    "rank-agreement": "no vLLM compares its ranks",
}


def test_each_patch_has_its_fault_here():
    assert FAULTS.keys() | NOT_TOLD_BY_CODE.keys() == IMPLEMENTATIONS.keys()


@pytest.mark.parametrize("spec", [spec for spec in load_ledger() if spec.name in FAULTS], ids=lambda spec: spec.name)
def test_a_release_has_the_fault_exactly_where_the_entry_says(release: str, spec: Any):
    fake_flashinfer.install()
    found = None
    for target in spec.targets:
        try:
            module = importlib.import_module(target.module)
        except ImportError:
            continue
        if defines(module, target.qualname):
            found = resolve(module, target.qualname)
            break
    assert (found is not None and FAULTS[spec.name](found)) is (release in spec.releases)
