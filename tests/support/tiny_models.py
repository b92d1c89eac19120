"""Models of transformers with random weights, small enough to generate hundreds of times in a test."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCABULARY = 13
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "attn_implementation": "eager",
}


@functools.cache
def model(kind: str) -> Any:
    """A model in evaluation mode; the same one at each call."""
    torch.manual_seed(0)
    if kind == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL))
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            bos_token_id=1,
            eos_token_id=2,
            n_embd=16,
            n_layer=2,
            n_head=2,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        made = transformers.GPT2LMHeadModel(config)
    elif kind == "by layer":
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SMALL, head_dim=8))
    elif kind == "sliding":
        made = transformers.MistralForCausalLM(transformers.MistralConfig(**_SMALL, sliding_window=24))
    elif kind == "hybrid":
        layers = ["sliding_attention", "full_attention"]
        config = transformers.Gemma2Config(**_SMALL, head_dim=8, sliding_window=24, layer_types=layers)
        made = transformers.Gemma2ForCausalLM(config)
    elif kind == "encoder-decoder":
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            initializer_factor=8.0,
        )
        made = transformers.T5ForConditionalGeneration(config)
    elif kind == "mamba":
        config = transformers.MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            time_step_rank=2,
            initializer_range=0.4,
        )
        made = transformers.MambaForCausalLM(config)
    elif kind == "half mamba":
        config = transformers.JambaConfig(
            **_SMALL,
            mamba_d_state=4,
            mamba_dt_rank=2,
            use_mamba_kernels=False,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
        )
        made = transformers.JambaForCausalLM(config)
    elif kind == "bloom":
        config = transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.4
        )
        made = transformers.BloomForCausalLM(config)
    elif kind == "alibi":
        config = transformers.FalconConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            alibi=True,
            initializer_range=0.4,
        )
        made = transformers.FalconForCausalLM(config)
    elif kind == "own cache":
        config = transformers.GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            initializer_range=0.4,
        )
        made = transformers.GPTNeoForCausalLM(config)
    else:
        raise ValueError(kind)
    made.eval()
    made.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1, decoder_start_token_id=0)
    return made


def prompts(lengths: list[int], side: str, seed: int = 0, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded with 0 on one side: `input_ids` and `attention_mask`."""
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
