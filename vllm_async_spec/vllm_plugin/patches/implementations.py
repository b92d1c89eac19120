"""All patches of vLLM's behaviour, by name in the ledger."""

from __future__ import annotations

from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.patches import (
    async_scheduling,
    carried_inputs,
    cpu_sampling,
    draft_graphs,
    draft_lengths,
    engine_report,
    fast_prefill,
    flashinfer_builder,
    flashinfer_xqa,
    lazy_outputs,
    metadata,
    min_tokens,
    mla_prefill,
    optimistic_runner,
    prometheus_registry,
    top_k_bound,
    virtual_batches,
)

PATCHES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        async_scheduling,
        carried_inputs,
        cpu_sampling,
        draft_graphs,
        draft_lengths,
        engine_report,
        fast_prefill,
        flashinfer_builder,
        flashinfer_xqa,
        lazy_outputs,
        metadata,
        min_tokens,
        mla_prefill,
        optimistic_runner,
        prometheus_registry,
        top_k_bound,
        virtual_batches,
    )
}
"""Modules by name. The name of each patch begins with its module's name."""

IMPLEMENTATIONS: dict[str, Implementation] = {
    name: implementation for module in PATCHES.values() for name, implementation in module.IMPLEMENTATIONS.items()
}
