"""Decides whether a batch of vLLM's V1 runner needs accepted counts on the host, and for which reason."""

from __future__ import annotations

from vllm_async_spec.vllm_plugin.upstream import InputBatch, RunnerBase

DEVICE_LENGTHS = frozenset(
    {
        "FLASH_ATTN",
        "TRITON_ATTN",
        "CUTLASS_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "TRITON_MLA",
    }
)
"""Names of backends that read only upper bounds on the host, or nothing. MLA itself fetches exact lengths if needed."""

_PLAIN_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs"})
"""Names of the KV cache specifications whose builders get the batch unchanged."""


def always_needed(runner: RunnerBase) -> str | None:
    """The reason why every batch of this runner needs exact counts; None if it depends on the batch.

    Args:
        runner: a runner whose KV cache has been initialised.
    """
    parallel = runner.parallel_config
    ngram_gpu = getattr(runner.speculative_config, "use_ngram_gpu", None)
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": runner.dcp_world_size > 1 or parallel.prefill_context_parallel_size > 1,
        "hybrid model": runner.model_config.is_hybrid,
        "n-gram drafts on the GPU": ngram_gpu is not None and ngram_gpu(),
        # Only the last rank of a pipeline has a drafter.
        "drafter": not hasattr(getattr(runner, "drafter", None), "backup_next_token_ids"),
        "multimodal pruning": runner.is_multimodal_pruning_enabled,
        "prompt embeddings": runner.enable_prompt_embeds,
        "micro-batches": parallel.use_ubatching,
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or _backend(runner)


def _backend(runner: RunnerBase) -> str | None:
    """The first attention backend that may need exact lengths on the host, in words, or None."""
    for groups in runner.attn_groups:
        for group in groups:
            name = group.backend.get_name()
            cut = any(getattr(builder, "cuts_on_device", False) for builder in group.metadata_builders)
            plain = type(group.kv_cache_spec).__name__ in _PLAIN_SPECS
            if name not in DEVICE_LENGTHS or not (plain or cut):
                return f"attention backend {name}" + ("" if plain else f" with {type(group.kv_cache_spec).__name__}")
            # Another plugin may register its backend under vLLM's name.
            for builder in map(type, group.metadata_builders):
                if builder.__module__.partition(".")[0] not in ("vllm", "vllm_async_spec"):
                    return f"attention backend {name} with {builder.__module__}.{builder.__qualname__}"
    return None


def needed_by(input_batch: InputBatch) -> str | None:
    """The reason why the step after this batch needs its accepted counts on the host, or None."""
    if not input_batch.no_penalties:
        return "penalties"
    if input_batch.bad_words_token_ids:
        return "bad words"
    if input_batch.sampling_metadata.output_token_ids:
        return "logits processors"
    if any(getattr(processor, "min_toks", None) for processor in input_batch.logitsprocs.all):
        return "min_tokens"
    return None
