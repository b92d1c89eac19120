"""Models given by their sizes: the files that vLLM needs to run a model with random weights.

A directory with a `config.json` is enough: weights are dummies, prompts are token ids, and no tokenizer is loaded.
No shape ties its head to its embeddings, because the two are arranged differently (see `acceptance`). A step reads the
whole head and a few rows of the embeddings whether they are one matrix or two.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mrope import ARCHITECTURE as MROPE_LLAMA


class Method(str, enum.Enum):
    """How drafts are made, by vLLM's names."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    DRAFT_MODEL = "draft_model"
    MTP = "mtp"
    NGRAM = "ngram"
    NGRAM_GPU = "ngram_gpu"
    SUFFIX = "suffix"


class ShapeError(ValueError):
    """A shape, or its drafter for a method, does not exist; the message names those that do."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One model."""

    name: str
    about: str
    parameters: float
    """Expected number of parameters; a test counts them."""
    target: Mapping[str, Any]
    """Its config.json."""
    drafters: Mapping[Method, Mapping[str, Any] | None]
    """A config.json for each method; None if the target's own directory holds the drafter, or no drafter is needed."""

    @property
    def expert_parameters(self) -> int:
        """Parameters of the target's routed experts: three matrices each, in every layer after the dense ones."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        experts: int = next((self.target[name] for name in names if name in self.target), 0)
        if experts < 2:
            return 0
        layers = max(self.target["num_hidden_layers"] - self.target.get("first_k_dense_replace", 0), 0)
        width = self.target.get("moe_intermediate_size") or self.target["intermediate_size"]
        found: int = layers * experts * 3 * self.target["hidden_size"] * width
        return found


@dataclass(frozen=True, slots=True)
class Models:
    """Directories that vLLM takes for models."""

    target: Path
    drafter: Path | None


def write_models(shape: Shape, method: Method | None, folder: Path) -> Models:
    """Write the directories of `shape` for drafting by `method` (None: no drafting) into `folder`.

    Raises:
        ShapeError: this shape has no such drafter.
    """
    target = _write(folder / shape.name / "target", shape.target)
    if method is None:
        return Models(target, None)
    if method not in shape.drafters:
        known = ", ".join(known.value for known in shape.drafters)
        raise ShapeError(f"shape {shape.name!r} has no drafter for {method.value!r}; it has {known}")
    config = shape.drafters[method]
    return Models(target, _write(folder / shape.name / method.value, config) if config else target)


def find_shape(name: str) -> Shape:
    """The shape of this name.

    Raises:
        ShapeError: no shape has this name.
    """
    if name not in SHAPES:
        raise ShapeError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def _write(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 65_536,
    "rope_theta": 500_000.0,
}


def _llama(
    *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocabulary: int
) -> dict[str, Any]:
    return _COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "mlp_bias": False,
    }


def _small_llama(vocabulary: int) -> dict[str, Any]:
    """A draft model that costs little next to any target but the tiny one."""
    return _llama(
        hidden=1024, layers=2, heads=16, kv_heads=8, head_dim=64, intermediate=4096, vocabulary=vocabulary
    )  # fmt: skip


_LLAMA_1B = _llama(
    hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocabulary=128_256
)  # fmt: skip
_LLAMA_8B = _llama(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocabulary=128_256
)  # fmt: skip
_TINY = _llama(hidden=128, layers=2, heads=2, kv_heads=1, head_dim=64, intermediate=256, vocabulary=1024)
_TINY_DRAFT = _llama(hidden=64, layers=1, heads=1, kv_heads=1, head_dim=64, intermediate=128, vocabulary=1024)

_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
}
_QWEN3_30B_A3B = _QWEN3_MOE | {"num_hidden_layers": 48, "num_experts": 128}
_QWEN3_MOE_EAGLE = _llama(
    hidden=2048, layers=1, heads=32, kv_heads=4, head_dim=128, intermediate=6144, vocabulary=151_936
)  # fmt: skip

# Every second layer attends within a window, from the first on.
_GPT_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 201_088,
}
_GPT_OSS_EAGLE = _llama(
    hidden=2880, layers=1, heads=64, kv_heads=8, head_dim=64, intermediate=8640, vocabulary=201_088
)  # fmt: skip

# Three layers of four have linear attention, whose state is a matrix for each head.
_QWEN3_NEXT = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 1,
    "vocab_size": 151_936,
}

# Llama 4 without its experts: three layers of four attend within chunks, here short ones.
_LOCAL = _COMMON | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1024,
    "intermediate_size_mlp": 4096,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1000,
    "moe_layers": [],
    "no_rope_layers": [1, 1, 1, 0] * 2,
    "attention_chunk_size": 128,
    "use_qk_norm": True,
    "attn_temperature_tuning": False,
    "vocab_size": 32_000,
}

# DeepSeek-V3's architecture, because vLLM supports its multi-token prediction layer, with DeepSeek-V2-Lite's sizes.
_DEEPSEEK_LITE = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "vocab_size": 102_400,
}
_DEEPSEEK_DENSE = _DEEPSEEK_LITE | {"first_k_dense_replace": _DEEPSEEK_LITE["num_hidden_layers"] + 1}

_TINY_LAYER = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
}
_TINY_MOE = _QWEN3_MOE | _TINY_LAYER | {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8}
_TINY_MOE_EAGLE = _llama(hidden=256, layers=1, heads=4, kv_heads=2, head_dim=64, intermediate=256, vocabulary=1024)
_TINY_MLA = _DEEPSEEK_LITE | _TINY_LAYER | {"num_key_value_heads": 4, "n_routed_experts": 8}

_TINY_GPT_OSS = (
    _GPT_OSS
    | {name: size for name, size in _TINY_LAYER.items() if name != "moe_intermediate_size"}
    | {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
)
# Four layers, of which the last has full attention.
_TINY_HYBRID = (
    _QWEN3_NEXT
    | _TINY_LAYER
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
)

# No experts, so that a tiny engine needs none of their kernels; its prediction layer is dense too.
_TINY_MTP = _TINY_MLA | {"first_k_dense_replace": _TINY_LAYER["num_hidden_layers"] + 1}
# The demo's byte vocabulary, with the end of text at its tokenizer's id.
_TEXT = {"vocab_size": 272, "bos_token_id": 256, "eos_token_id": 256}
# Keys and values as wide as the hidden state, so that attention can copy an embedding.
_TINY_EAGLE3 = _TINY | {
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 500_000.0}}


_NO_DRAFTER: dict[Method, Mapping[str, Any] | None] = dict.fromkeys((Method.NGRAM, Method.NGRAM_GPU, Method.SUFFIX))
"""Methods that draft without a model."""


def _one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The EAGLE drafter of a Llama: the same model with one layer."""
    return {**config, "num_hidden_layers": 1}


def _llama_shape(name: str, about: str, parameters: float, target: Mapping[str, Any]) -> Shape:
    # Keys and values as wide as the hidden state, so that attention can copy an embedding.
    eagle3 = _one_layer(target) | {"num_key_value_heads": target["num_attention_heads"]}
    drafters: dict[Method, Mapping[str, Any] | None] = {
        Method.EAGLE: _one_layer(target),
        Method.EAGLE3: eagle3,
        Method.DRAFT_MODEL: _small_llama(target["vocab_size"]),
    }
    return Shape(name, about, parameters, target, drafters | _NO_DRAFTER)


SHAPES = {
    shape.name: shape
    for shape in (
        _llama_shape("1b", "Llama-3.2-1B with a head of its own", 1.50e9, _LLAMA_1B),
        _llama_shape("8b", "Llama-3-8B", 8.03e9, _LLAMA_8B),
        Shape(
            "moe",
            "Qwen3-30B-A3B with a third of its layers and half of its experts",
            5.76e9,
            _QWEN3_MOE,
            {Method.EAGLE: _QWEN3_MOE_EAGLE, Method.DRAFT_MODEL: _small_llama(151_936)},
        ),
        Shape(
            "gpt-oss",
            "gpt-oss-20b with a third of its layers, in bfloat16",
            7.53e9,
            _GPT_OSS,
            {Method.EAGLE: _GPT_OSS_EAGLE},
        ),
        Shape(
            "hybrid",
            "Qwen3-Next with a quarter of its layers and an eighth of its experts",
            3.46e9,
            _QWEN3_NEXT,
            {Method.MTP: None},
        ),
        Shape("a3b", "Qwen3-30B-A3B", 30.5e9, _QWEN3_30B_A3B, {Method.EAGLE: _QWEN3_MOE_EAGLE}),
        Shape(
            "mla",
            "DeepSeek-V2-Lite's sizes in DeepSeek-V3's architecture, with one prediction layer",
            15.7e9,
            _DEEPSEEK_LITE,
            {Method.MTP: None},
        ),
        Shape(
            "mla-dense",
            "the same without experts, its prediction layer too",
            2.60e9,
            _DEEPSEEK_DENSE,
            {Method.MTP: None},
        ),
        Shape(
            "local",
            "Llama 4's chunked local attention in a dense model of eight layers",
            0.191e9,
            _LOCAL,
            {Method.DRAFT_MODEL: _small_llama(32_000)},
        ),
        Shape(
            "tiny",
            "a Llama for tests on a CPU",
            0.558e6,
            _TINY,
            {Method.EAGLE: _one_layer(_TINY), Method.EAGLE3: _TINY_EAGLE3, Method.DRAFT_MODEL: _TINY_DRAFT}
            | _NO_DRAFTER,
        ),
        Shape(
            "tiny-text",
            "the same with a byte for each token",
            0.366e6,
            _TINY | _TEXT,
            {
                Method.EAGLE: _one_layer(_TINY | _TEXT),
                Method.DRAFT_MODEL: _TINY_DRAFT | _TEXT,
                Method.NGRAM: None,
                Method.NGRAM_GPU: None,
            },
        ),
        Shape(
            "tiny-mrope",
            "the same with positions of three axes",
            0.558e6,
            _TINY | _MROPE | {"architectures": [MROPE_LLAMA]},
            {Method.EAGLE: _one_layer(_TINY | _MROPE)},
        ),
        Shape("tiny-moe", "the same of moe", 1.72e6, _TINY_MOE, {Method.EAGLE: _TINY_MOE_EAGLE}),
        Shape("tiny-gpt-oss", "the same of gpt-oss", 4.08e6, _TINY_GPT_OSS, {Method.EAGLE: _TINY_MOE_EAGLE}),
        Shape("tiny-hybrid", "the same of hybrid", 3.37e6, _TINY_HYBRID, {Method.MTP: None}),
        Shape("tiny-mla", "the same of mla", 3.22e6, _TINY_MLA, {Method.MTP: None}),
        Shape("tiny-mtp", "the same without experts", 2.92e6, _TINY_MTP, {Method.MTP: None}),
    )
}
