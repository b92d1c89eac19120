"""A target and a draft model whose heads can be divided among up to eight ranks, with random weights."""

from pathlib import Path

import torch

VOCABULARY = 256


def prepare(folder: Path) -> tuple[Path, Path]:
    """Make both models in `folder`: the target, and its first layer as drafter, of which many drafts are accepted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        initializer_range=0.1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        dtype="float32",
    )
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in target.model.layers[1].named_parameters():
            if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                weight.mul_(0.3)
    target.save_pretrained(folder / "target")
    config.num_hidden_layers = 1
    draft = LlamaForCausalLM(config).eval()
    draft.load_state_dict({name: w for name, w in target.state_dict().items() if ".layers.1." not in name})
    draft.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
