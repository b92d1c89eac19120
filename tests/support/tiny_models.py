"""Models of transformers with random weights, small enough to generate hundreds of times in a test."""

import functools
from typing import Any

import torch
import transformers

VOCABULARY = 13


def _rotary(kind: str, **numbers: Any) -> dict[str, Any]:
    """Rotary positions of this kind, for sequences that are soon too long; transformers 5 has another name for them."""
    told = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **numbers}
    return {"max_position_embeddings": 8, "rope_scaling": told}


_ALL = {"vocab_size": VOCABULARY, "initializer_range": 0.4}
_SMALL = {
    **_ALL,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
_GPT2 = {"bos_token_id": 1, "eos_token_id": 2, "n_embd": 16, "n_layer": 2, "n_head": 2, "attn_implementation": "eager"}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "initializer_factor": 8.0}
_JAMBA = {
    "mamba_d_state": 4,
    "mamba_dt_rank": 2,
    "use_mamba_kernels": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
_BY_LAYER = {"head_dim": 8, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_NEO = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
_LONG = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "attention_factor": 1.0}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SMALL),
    "gpt2": ("GPT2LMHeadModel", {**_ALL, **_GPT2}),
    "by layer": ("Qwen3ForCausalLM", {**_SMALL, "head_dim": 8}),
    "sliding": ("MistralForCausalLM", {**_SMALL, "sliding_window": 24}),
    "hybrid": ("Gemma3ForCausalLM", {**_SMALL, **_BY_LAYER}),
    "softcap": ("Gemma2ForCausalLM", {**_SMALL, **_BY_LAYER}),
    "encoder-decoder": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, **_T5},
    ),
    "mamba": (
        "MambaForCausalLM",
        {**_ALL, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2},
    ),
    "half mamba": ("JambaForCausalLM", {**_SMALL, **_JAMBA}),
    "bloom": ("BloomForCausalLM", {**_ALL, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "alibi": (
        "FalconForCausalLM",
        {**_ALL, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True},
    ),
    "bias": ("DogeForCausalLM", {**_SMALL, "keep_window_size": 128}),
    "masked": ("OPTForCausalLM", {**_SMALL, "init_std": 0.4, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "window in mask": ("MoshiForCausalLM", {**_SMALL, "ffn_dim": 32, "sliding_window": 24, "pad_token_id": 0}),
    "unused window": ("Qwen2ForCausalLM", {**_SMALL, "use_sliding_window": False, "sliding_window": 24}),
    "mamba beside": ("FalconH1ForCausalLM", _SMALL),
    "strided": ("JetMoeForCausalLM", {**_SMALL, "kv_channels": 8}),
    "vision": ("LlavaForConditionalGeneration", {"text_config": _SMALL, "vision_config": _VISION}),
    "own cache": ("GPTNeoForCausalLM", {**_ALL, **_NEO}),
    "counts positions": ("CTRLLMHeadModel", {**_ALL, "n_embd": 16, "dff": 32, "n_layer": 2, "n_head": 2}),
    "dynamic rotary": ("LlamaForCausalLM", {**_SMALL, **_rotary("dynamic")}),
    "long rotary": ("LlamaForCausalLM", {**_SMALL, **_rotary("longrope", **_LONG)}),
    "own positions": ("XLMRobertaXLForCausalLM", {**_SMALL, "is_decoder": True, "pad_token_id": 0}),
}
"""The class and the configuration of each kind."""


@functools.cache
def model(kind: str) -> Any:
    torch.manual_seed(0)
    name, numbers = _KINDS[kind]
    made_of = getattr(transformers, name)
    made = made_of(made_of.config_class(**numbers)).eval()
    made.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1, decoder_start_token_id=0)
    return made


def prompts(
    lengths: list[int], side: str = "left", seed: int = 0, vocabulary: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(longest - length, None) if side == "left" else slice(0, length)
        ids[row, place] = torch.randint(1, vocabulary, (length,), generator=generator)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer() -> Any:
    """One token a letter, `a` being token 0."""
    import tokenizers

    letters = {chr(ord("a") + token): token for token in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="a"))
    words.decoder = tokenizers.decoders.Fuse()
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
