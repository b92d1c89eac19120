"""The config.json of each model that a shape names, and of their drafters."""

from typing import Any

COMMON: dict[str, Any] = {
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


def llama(
    *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocabulary: int
) -> dict[str, Any]:
    """A Llama of these sizes."""
    return COMMON | {
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


def small_llama(vocabulary: int) -> dict[str, Any]:
    """A draft model that costs little next to any target but the tiny one."""
    return llama(hidden=1024, layers=2, heads=16, kv_heads=8, head_dim=64, intermediate=4096, vocabulary=vocabulary)


LLAMA_1B = llama(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocabulary=128_256)
LLAMA_8B = llama(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocabulary=128_256)
TINY = llama(hidden=128, layers=2, heads=2, kv_heads=1, head_dim=64, intermediate=256, vocabulary=1024)
TINY_DRAFT = llama(hidden=64, layers=1, heads=1, kv_heads=1, head_dim=64, intermediate=128, vocabulary=1024)

QWEN3_MOE = COMMON | {
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
QWEN3_30B_A3B = QWEN3_MOE | {"num_hidden_layers": 48, "num_experts": 128}
QWEN3_MOE_EAGLE = llama(
    hidden=2048, layers=1, heads=32, kv_heads=4, head_dim=128, intermediate=6144, vocabulary=151_936
)

# Every second layer attends within a window, from the first on.
GPT_OSS = COMMON | {
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
GPT_OSS_EAGLE = llama(hidden=2880, layers=1, heads=64, kv_heads=8, head_dim=64, intermediate=8640, vocabulary=201_088)

# Three layers of four have linear attention, whose state is a matrix for each head.
QWEN3_NEXT = COMMON | {
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
LOCAL = COMMON | {
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
DEEPSEEK_LITE = COMMON | {
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
DEEPSEEK_DENSE = DEEPSEEK_LITE | {"first_k_dense_replace": DEEPSEEK_LITE["num_hidden_layers"] + 1}

TINY_LAYER = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
}
TINY_MOE = QWEN3_MOE | TINY_LAYER | {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8}
TINY_MOE_EAGLE = llama(hidden=256, layers=1, heads=4, kv_heads=2, head_dim=64, intermediate=256, vocabulary=1024)
TINY_MLA = DEEPSEEK_LITE | TINY_LAYER | {"num_key_value_heads": 4, "n_routed_experts": 8}

TINY_GPT_OSS = (
    GPT_OSS
    | {name: size for name, size in TINY_LAYER.items() if name != "moe_intermediate_size"}
    | {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
)
# Four layers, of which the last has full attention.
TINY_HYBRID = (
    QWEN3_NEXT
    | TINY_LAYER
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
TINY_MTP = TINY_MLA | {"first_k_dense_replace": TINY_LAYER["num_hidden_layers"] + 1}
# The demo's byte vocabulary, with the end of text at its tokenizer's id.
TEXT = {"vocab_size": 272, "bos_token_id": 256, "eos_token_id": 256}
# Keys and values as wide as the hidden state, so that attention can copy an embedding.
TINY_EAGLE3 = TINY | {
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 500_000.0}}
