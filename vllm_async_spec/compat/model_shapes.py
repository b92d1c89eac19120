"""Shapes of the models that use vLLM's metadata builders: heads, sizes, windows and KV-cache dtypes.

A builder may take another path for other numbers, so the suite tries each builder with the numbers of real models. A
shape sets configuration only: no weights and no KV cache are made. `max_model_len` is the suite's own, because vLLM
sizes its workspaces by that number, and the batches reach both sides of each workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


class UnknownModelError(ValueError):
    """A name is no model's; the message is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of one model that its metadata builders may read.

    Attributes:
        name: What `--model` takes and the tables call it. `-tp8` means tensor parallelism over eight GPUs, `-window`
            the KV-cache group of the layers with a sliding window.
        heads: Query heads of a layer on all GPUs together; `kv_heads` likewise.
        tensor_parallel: GPUs that share the heads.
        window: Tokens that each query sees in the builder's layers; None for all.
        windows: The same for all layers of the model, each value once.
        sinks: Whether attention has sinks.
        cache_dtype: vLLM's `--kv-cache-dtype`. A backend for another dtype overrides it.
        latent: Whether the model has multi-head latent attention.
        attributes: Further attributes of the Hugging Face configuration.
        state: Shapes of a state-space layer's states.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    tensor_parallel: int = 1
    window: int | None = None
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    cache_dtype: str = "auto"
    latent: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    state: tuple[tuple[int, ...], ...] = ((4, 4), (4, 4, 4))


_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536}
_INDEXED = _LATENT | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
_DEEPSEEK: dict[str, Any] = {"heads": 128, "kv_heads": 128, "head_size": 192, "latent": True}
_GPT_OSS: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_size": 64, "windows": (128, None), "sinks": True}
_GEMMA_3: dict[str, Any] = {"heads": 32, "kv_heads": 16, "head_size": 128, "windows": (1024, None)}

TINY = Model("tiny", 8, 2, 64)
"""The model whose attention the suite runs: small enough for a reference on a CPU."""

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            TINY,
            Model("llama-8b", 32, 8, 128),
            Model("llama-8b-tp8", 32, 8, 128, tensor_parallel=8),
            Model("llama-70b", 64, 8, 128),
            Model("llama-70b-tp8", 64, 8, 128, tensor_parallel=8),
            Model("llama-70b-fp8", 64, 8, 128, cache_dtype="fp8"),
            Model("llama-4-scout", 40, 8, 128),
            Model("gpt-oss-120b", **_GPT_OSS),
            Model("gpt-oss-120b-window", **_GPT_OSS, window=128),
            Model("gemma-3-27b", **_GEMMA_3),
            Model("gemma-3-27b-window", **_GEMMA_3, window=1024),
            Model("gemma-3n-e4b", 8, 2, 256, windows=(512, None)),
            Model("deepseek-v3", **_DEEPSEEK, attributes=_LATENT),
            Model("deepseek-v3-tp8", **_DEEPSEEK, attributes=_LATENT, tensor_parallel=8),
            Model("deepseek-v3.2", **_DEEPSEEK, attributes=_INDEXED),
            Model("deepseek-v3.2-tp8", **_DEEPSEEK, attributes=_INDEXED, tensor_parallel=8),
            Model("qwen3-next-80b", 16, 2, 256, state=((3, 8192), (32, 128, 128))),
            Model("falcon-mamba-7b", 32, 32, 128, state=((3, 8192), (8192, 16))),
            Model("nemotron-h-8b", 32, 8, 128, attributes={"chunk_size": 128}, state=((3, 10240), (128, 64, 128))),
            Model("minimax-text-01", 64, 8, 128, state=((64, 128, 128),)),
            Model("lfm2-1.2b", 32, 8, 64, state=((2, 2048),)),
            Model("whisper-large-v3", 20, 20, 64),
            Model("bert-large", 16, 16, 64),
        )
    }
)
"""All models by name, in the order in which help texts list them."""

_LLAMA = ("llama-8b", "llama-8b-tp8", "llama-70b", "llama-70b-tp8")
_SINKS = ("gpt-oss-120b", "gpt-oss-120b-window")
_GEMMA = ("gemma-3-27b", "gemma-3-27b-window")
_MLA = ("deepseek-v3", "deepseek-v3-tp8")
_SPARSE = ("deepseek-v3.2", "deepseek-v3.2-tp8")

MODELS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "FLASH_ATTN": (*_LLAMA, "llama-70b-fp8", *_SINKS, *_GEMMA, "qwen3-next-80b"),
        "FLASH_ATTN_FA2": ("llama-8b", "llama-70b-tp8", *_GEMMA),
        "FLASH_ATTN_DCP": ("llama-70b", "llama-70b-tp8"),
        "FLASH_ATTN_CASCADE": ("llama-8b", "llama-70b-tp8"),
        "TRITON_ATTN": ("llama-8b", "llama-70b-tp8", *_SINKS),
        "FLEX_ATTENTION": ("llama-8b", "gemma-3-27b-window"),
        "TREE_ATTN": ("llama-8b", "llama-70b-tp8"),
        "TURBOQUANT": ("llama-8b", "llama-70b-tp8"),
        "TRITON_MLA": _MLA,
        "FLASH_ATTN_MLA": _MLA,
        "FLASHMLA": _MLA,
        "FLASHINFER_MLA": _MLA,
        "CUTLASS_MLA": _MLA,
        "MLA_PREFILL_FLASH_ATTN": _MLA,
        "MLA_PREFILL_FLASHINFER": _MLA,
        "MLA_PREFILL_TRTLLM": _MLA,
        "MLA_PREFILL_CUDNN": _MLA,
        "INDEXER": _SPARSE,
        "FLASHMLA_SPARSE": _SPARSE,
        "FLASHMLA_SPARSE_FP8": _SPARSE,
        "FLASHINFER": (*_LLAMA, "llama-70b-fp8", *_GEMMA),
        "FLASHINFER_XQA": (*_LLAMA, "llama-70b-fp8", *_SINKS),
        "FLASHINFER_TRTLLM": (*_LLAMA, "llama-70b-fp8", *_SINKS),
        "FLASHINFER_DCP": ("llama-70b", "llama-70b-tp8"),
        "MAMBA1": ("falcon-mamba-7b",),
        "MAMBA2": ("nemotron-h-8b",),
        "GDN": ("qwen3-next-80b",),
        "LINEAR": ("minimax-text-01",),
        "SHORT_CONV": ("lfm2-1.2b",),
        "CHUNKED_LOCAL": ("llama-4-scout",),
        "FAST_PREFILL": ("gemma-3n-e4b",),
        "CROSS_ATTENTION": ("whisper-large-v3",),
        "ENCODER_ONLY": ("bert-large",),
        "CPU_ATTN": ("llama-8b", "gpt-oss-120b", "gpt-oss-120b-window"),
    }
)
"""Names of the models that use each of vLLM's builders; the first is tried with everything the host may be told."""

THIRD_PARTY = (TINY.name, "llama-70b", "llama-70b-tp8")
"""Names of the models for a builder that is not vLLM's."""


def why_not_for(backend: str, model: Model) -> str | None:
    """Why one of vLLM's backends can't have a model; None if it can.

    Only the two kinds of attention exclude each other: a builder of latent attention reads numbers that others lack.
    """
    users = MODELS_OF[backend]
    if model is TINY or model.latent is MODELS[users[0]].latent:
        return None
    return f"{'has' if model.latent else 'lacks'} latent attention; try {', '.join(users)}"


def models_named(names: Sequence[str]) -> tuple[Model, ...]:
    """The models of these names, each once.

    Raises:
        UnknownModelError: A name is no model's.
    """
    for name in names:
        if name not in MODELS:
            raise UnknownModelError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    return tuple(MODELS[name] for name in dict.fromkeys(names))
