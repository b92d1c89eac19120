"""The loaded release's metadata builders under chunked local attention, made the same way for every release."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import BuilderInputs

__all__ = ["layer_module", "local_attention_builder"]


def layer_module() -> ModuleType:
    """The release's module of chunked local attention.

    Raises:
        ImportError: The loaded release has it in none of the known places.
    """
    for name in ("vllm.model_executor.layers.attention", "vllm.attention.layers"):
        try:
            return importlib.import_module(f"{name}.chunked_local_attention")
        except ModuleNotFoundError:
            continue
    raise ImportError("the loaded vLLM has no module of chunked local attention that we know")


def local_attention_builder(backend: Any, setting: BuilderInputs, chunk: int, block_size: int) -> Any:
    """The release's metadata builder of `backend` under chunked local attention.

    Args:
        backend: A class of attention backend, such as `FlashAttentionBackend`.
        setting: What it is made from, but for the shape of its KV cache.
        chunk: Tokens in an attention chunk.
        block_size: Tokens in a block of the KV cache.

    Returns:
        The builder. CUDA graphs are piecewise, as the engine's are when a layer has such attention.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    create = layer_module().create_chunked_local_attention_backend
    # Up to 0.17 the backend is made for one block size.
    sizes = (chunk, block_size) if "block_size" in inspect.signature(create).parameters else (chunk,)
    full, layers, config, device = setting.arguments(block_size=block_size)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=torch.bfloat16,
        attention_chunk_size=chunk,
    )
    return setting.construct(create(backend, *sizes).get_builder_cls(), spec, layers, config, device)
