"""What a metadata builder is made from: vLLM's configuration of a tiny model, and the shape of its KV cache.

A factory of a backend's own is given a `BuilderInputs`, and takes from it what its builder wants.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.compat.builders import llama_config, ngram_drafts
from vllm_async_spec.compat.cases import BLOCK_SIZE, DRAFT_TOKENS, MAX_MODEL_LEN
from vllm_async_spec.compat.vllm_source import loaded_source

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["HEADS", "HEAD_SIZE", "KV_HEADS", "LAYER", "BuilderInputs"]

LAYER = "model.layers.0.self_attn.attn"
"""The name of the one layer that every builder is for."""

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
"""Of the model: query heads, KV heads, and the width of one."""


@dataclass(frozen=True, slots=True)
class BuilderInputs:
    """What there is to make a builder from.

    Attributes:
        device: Where its buffers belong: a GPU, or what passes for one. Pass it on as it is.
    """

    device: torch.device

    def vllm_config(self, **engine_args: Any) -> VllmConfig:
        """A new configuration of a Llama of two small layers with `DRAFT_TOKENS` n-gram drafts.

        Args:
            **engine_args: Further arguments of vLLM's `EngineArgs`, or other values for those above.
        """
        drafts = ngram_drafts(DRAFT_TOKENS)
        wanted = {"block_size": BLOCK_SIZE, "speculative_config": drafts, "max_num_seqs": 256} | engine_args
        source = loaded_source()
        key = repr((sorted(wanted.items()), source and source.capability))
        if key not in _MADE:
            _MADE[key] = llama_config(
                wanted, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, max_model_len=MAX_MODEL_LEN
            )
        return copy.deepcopy(_MADE[key])

    def arguments(self, **engine_args: Any) -> tuple[Any, list[str], VllmConfig, torch.device]:
        """What vLLM makes every builder of full attention from: KV cache, layers' names, configuration, device.

        Args:
            **engine_args: As `vllm_config` takes them.
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        config = self.vllm_config(**engine_args)
        block_size = config.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        return spec, [LAYER], config, self.device

    @staticmethod
    def construct(cls: Any, *arguments: Any) -> Any:
        """A builder, made as in an engine: where its configuration, the third of `arguments`, is the current one."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(arguments[2]):
            return cls(*arguments)


_MADE: dict[str, VllmConfig] = {}
"""Configurations as they were made: vLLM takes longer for one than a builder for a batch."""
