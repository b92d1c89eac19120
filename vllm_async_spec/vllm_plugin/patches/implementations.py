"""Every patch of vLLM's behaviour, by its name in the ledger."""

from __future__ import annotations

from vllm_async_spec.vllm_plugin.patches import (
    async_scheduling,
    draft_graphs,
    draft_lengths,
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

IMPLEMENTATIONS = {
    **async_scheduling.IMPLEMENTATIONS,
    **draft_graphs.IMPLEMENTATIONS,
    **draft_lengths.IMPLEMENTATIONS,
    **fast_prefill.IMPLEMENTATIONS,
    **flashinfer_builder.IMPLEMENTATIONS,
    **flashinfer_xqa.IMPLEMENTATIONS,
    **lazy_outputs.IMPLEMENTATIONS,
    **metadata.IMPLEMENTATIONS,
    **min_tokens.IMPLEMENTATIONS,
    **mla_prefill.IMPLEMENTATIONS,
    **optimistic_runner.IMPLEMENTATIONS,
    **prometheus_registry.IMPLEMENTATIONS,
    **top_k_bound.IMPLEMENTATIONS,
    **virtual_batches.IMPLEMENTATIONS,
}
