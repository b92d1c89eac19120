"""The loaded release's metadata builders under chunked local attention, made the same way for every release."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_async_spec.compat.builders import engine_config, write_llama

__all__ = ["layer_module", "local_attention_builder"]


def layer_module() -> ModuleType:
    """The release's module of chunked local attention.

    Raises:
        ImportError: the loaded release has it in none of the known places.
    """
    for name in ("vllm.model_executor.layers.attention", "vllm.attention.layers"):
        try:
            return importlib.import_module(f"{name}.chunked_local_attention")
        except ModuleNotFoundError:
            continue
    raise ImportError("the loaded vLLM has no module of chunked local attention that we know")


def local_attention_builder(backend: Any, chunk: int, *, block_size: int = 16, spec_tokens: int = 0) -> Any:
    """The release's metadata builder of `backend` under chunked local attention, on the CPU.

    Args:
        backend: a class of attention backend, such as `FlashAttentionBackend`.
        chunk: tokens in an attention chunk.
        block_size: tokens in a block of the KV cache.
        spec_tokens: draft tokens of each step; 0 is no speculation.

    Returns:
        The builder. CUDA graphs are piecewise, as the engine's are when a layer has such attention.
    """
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    create = layer_module().create_chunked_local_attention_backend
    # Up to 0.17 the backend is made for one block size.
    sizes = (chunk, block_size) if "block_size" in inspect.signature(create).parameters else (chunk,)
    drafts = {"method": "ngram", "num_speculative_tokens": spec_tokens, "prompt_lookup_max": 2} if spec_tokens else None
    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(write_llama(Path(scratch)), block_size=block_size, speculative_config=drafts)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=chunk
    )
    with set_current_vllm_config(config):
        return create(backend, *sizes).get_builder_cls()(
            spec, ["model.layers.0.self_attn.attn"], config, torch.device("cpu")
        )
