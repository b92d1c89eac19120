"""The loaded release's metadata builders of multi-head latent attention, made the same way for every release."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.builders import engine_config, write_llama

__all__ = ["PrefillBackend", "mla_builder"]

# DeepSeek-V2's.
_DIMENSIONS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


class PrefillBackend:
    """Stands in for the layer's prefill backend, which prepares kernels: keeps what it was given."""

    def __init__(self) -> None:
        self.prepared: list[Any] = []

    def clone(self) -> PrefillBackend:
        """Another one, as each builder has."""
        return PrefillBackend()

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Keep `prefill_metadata`."""
        self.prepared.append(prefill_metadata)


def mla_builder(builder_class: Any, *, block_size: int = 64, spec_tokens: int = 0) -> Any:
    """The release's metadata builder `builder_class` of an MLA backend, on the CPU.

    Args:
        builder_class: such as `FlashMLAMetadataBuilder`.
        block_size: tokens in a block of the KV cache.
        spec_tokens: draft tokens of each step; 0 is no speculation.

    Returns:
        The builder. Its model is a small Llama with the latent dimensions of DeepSeek-V2; CUDA graphs are piecewise.
    """
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    drafts = {"method": "ngram", "num_speculative_tokens": spec_tokens, "prompt_lookup_max": 2} if spec_tokens else None
    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(write_llama(Path(scratch)), block_size=block_size, speculative_config=drafts)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    for name, value in (_DIMENSIONS | {"index_topk": 2048}).items():
        setattr(config.model_config.hf_text_config, name, value)
    object.__setattr__(config.model_config, "get_head_size", lambda: 576)
    layer = "model.layers.0.self_attn.attn"
    config.compilation_config.static_forward_context[layer] = SimpleNamespace(
        prefill_backend=PrefillBackend(), num_heads=8, dcp_manager=None, **_DIMENSIONS
    )
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        return builder_class(spec, [layer], config, torch.device("cpu"))
