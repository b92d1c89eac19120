"""All patches of vLLM's behaviour, by name in the ledger."""

from __future__ import annotations

import importlib

from vllm_async_spec.vllm_plugin.ledger import Implementation

_NAMES = (
    "async_scheduling",
    "carried_inputs",
    "context_parallel_lengths",
    "cpu_sampling",
    "draft_graphs",
    "draft_lengths",
    "drafter_agreement",
    "engine_report",
    "fast_prefill",
    "flashinfer_builder",
    "flashinfer_xqa",
    "lazy_outputs",
    "linear_attention",
    "metadata",
    "min_tokens",
    "mla_prefill",
    "optimistic_runner",
    "prometheus_registry",
    "prompt_ends",
    "rank_agreement",
    "steady_inputs",
    "steady_states",
    "top_k_bound",
    "virtual_batches",
)
PATCHES = {name: importlib.import_module(f"vllm_async_spec.vllm_plugin.patches.{name}") for name in _NAMES}
"""Modules by name. The name of each patch begins with its module's name."""

IMPLEMENTATIONS: dict[str, Implementation] = {
    name: implementation for module in PATCHES.values() for name, implementation in module.IMPLEMENTATIONS.items()
}
