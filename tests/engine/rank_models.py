"""Targets and draft models whose heads can be divided among up to eight ranks, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "dtype": "float32",
}


def prepare(folder: Path, *, kv_heads: int = 8) -> tuple[Path, Path]:
    """Make a Llama and its draft model in `folder`. Decode context parallelism needs fewer `kv_heads` than ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _write(folder, LlamaConfig(**_COMMON, num_key_value_heads=kv_heads, head_dim=64), LlamaForCausalLM)


def prepare_mla(folder: Path) -> tuple[Path, Path]:
    """Make a DeepSeek-V2 without experts and its draft model in `folder`; heads have the sizes that kernels take."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_COMMON,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=_COMMON["num_hidden_layers"],
    )
    return _write(folder, config, DeepseekV2ForCausalLM)


def prepare_moe(folder: Path) -> tuple[Path, Path]:
    """Make a Qwen3 whose second layer has experts and its draft model, which has none, in `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = _COMMON | {"num_key_value_heads": 8, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "mlp_only_layers": [0]}
    torch.manual_seed(0)
    target = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts)).eval()
    with torch.no_grad():
        layer = target.model.layers[1]
        layer.self_attn.o_proj.weight.mul_(0.3)
        for name, weight in layer.mlp.experts.named_parameters():
            if "down_proj" in name:
                weight.mul_(0.3)
    target.save_pretrained(folder / "target")
    draft = Qwen3ForCausalLM(Qwen3Config(**common | {"num_hidden_layers": 1})).eval()
    draft.load_state_dict({name: w for name, w in target.state_dict().items() if ".layers.1." not in name})
    draft.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def _write(folder: Path, config: PretrainedConfig, model: Any) -> tuple[Path, Path]:
    """The target, and its first layer as drafter, of which many drafts are accepted."""
    torch.manual_seed(0)
    target = model(config).eval()
    with torch.no_grad():
        for name, weight in target.model.layers[1].named_parameters():
            if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                weight.mul_(0.3)
    target.save_pretrained(folder / "target")
    config.num_hidden_layers = 1
    draft = model(config).eval()
    draft.load_state_dict({name: w for name, w in target.state_dict().items() if ".layers.1." not in name})
    draft.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
