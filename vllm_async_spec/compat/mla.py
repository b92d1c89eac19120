"""The loaded release's metadata builders of multi-head latent attention, made the same way for every release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.setting import LAYER, Setting

__all__ = ["mla_builder"]

# Latent and rotary parts, as DeepSeek V2 and V3 have them.
_DIMENSIONS = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


class _Layer(SimpleNamespace):
    """What a builder asks of its layer: its dimensions, and the kernels of its prefills, which prepare nothing."""

    num_heads = 8
    dcp_manager = None

    @property
    def prefill_backend(self) -> Any:
        from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

        kernels: Any = type("NoPrefill", (MLAPrefillBackend,), {})
        kernels.__abstractmethods__ = frozenset()  # none of them is called while metadata is built
        sizes = {name: getattr(self, name) for name in vars(self) if name != "q_lora_rank"}
        return kernels(num_heads=self.num_heads, scale=0.1, vllm_config=None, **sizes)


def mla_builder(builder_class: Any, setting: Setting, block_size: int) -> Any:
    """The release's metadata builder `builder_class` of an MLA backend.

    Args:
        builder_class: Such as `FlashMLAMetadataBuilder`.
        setting: What it is made from, but for the shape of its layer and of its KV cache.
        block_size: Tokens in a block of the KV cache.

    Returns:
        The builder. Its model is a small Llama with the latent dimensions of DeepSeek V2.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    _, layers, config, device = setting.arguments(block_size=block_size)
    for name, size in (_DIMENSIONS | {"index_topk": 2048}).items():
        setattr(config.model_config.hf_text_config, name, size)
    object.__setattr__(config.model_config, "get_head_size", lambda: 576)
    config.compilation_config.static_forward_context[LAYER] = _Layer(**_DIMENSIONS)
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    return setting.construct(builder_class, spec, layers, config, device)
