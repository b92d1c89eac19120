"""Files that a case needs beside its model: a byte tokenizer, a LoRA adapter. Nothing is downloaded."""

import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.acceptance import MARK, VOTE

_RANK = 8
_STRENGTH = 0.2
"""Size of the adapter's change of a matrix, relative to a matrix of attentive weights."""


def write_tokenizer(folder: Path, size: int = 0) -> Path:
    """Write the demo's tokenizer, a token for each byte and one for the end of text; return its directory.

    With a `size`, tokens beyond the demo's are words of four letters, which no text is encoded to.

    Raises:
        ImportError: `tokenizers` is not installed.
    """
    from vllm_async_spec.demo.train import EOS, byte_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads(byte_tokenizer().to_str())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    missing = range(len(vocabulary) + 1, size)
    if missing:
        vocabulary |= {EOS: len(vocabulary)} | {word: number for number, word in zip(missing, words, strict=False)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    return folder


def write_adapter(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a LoRA adapter of noise for a Llama of this config.json, as PEFT does; return its directory."""
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(0)
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    outputs = {"q_proj": (hidden, query), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (inputs, out) in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, inputs, generator=source) / inputs**0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(out, _RANK, generator=source) * _STRENGTH / _RANK**0.5
            if module == "o_proj":
                weights[f"{name}.lora_B.weight"][[MARK, VOTE]] = 0  # otherwise the adapter would write marks and votes
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings) + "\n")
    return folder
