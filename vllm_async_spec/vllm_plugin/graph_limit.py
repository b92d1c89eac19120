"""How many requests fit into vLLM's largest CUDA graph, where drafts multiply their tokens.

vLLM captures 512 tokens by default, 1,024 on some GPUs. With five drafts each request has six tokens in a step, so a
step of 86 requests has no graph, and the host launches each of its kernels: `CudagraphDispatcher.dispatch` of the V1
runner and `CudaGraphManager` of V2 compare a step's tokens with `max_cudagraph_capture_size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_config import VllmConfig


def graph_limit(config: VllmConfig) -> str | None:
    """From how many requests on steps have no CUDA graph, and what to give vLLM.

    None if every step of drafting requests has one, and without drafts or without CUDA graphs.
    """
    drafts, graphs, scheduler = config.speculative_config, config.compilation_config, config.scheduler_config
    captured = graphs.max_cudagraph_capture_size
    if drafts is None or not captured or getattr(graphs.cudagraph_mode, "name", "NONE") == "NONE":
        return None
    each = 1 + drafts.num_speculative_tokens
    fitting = captured // each
    if min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // each) <= fitting:
        return None
    return (
        f"steps of more than {fitting} requests with {each - 1} drafts have no CUDA graph, which costs host time: vLLM "
        f"captures up to {captured} tokens; if you expect more requests at once, give --max-cudagraph-capture-size, "
        f"{each} tokens for each of them"
    )
