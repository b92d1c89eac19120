"""Generate with stop flags that are read late: the same tokens as transformers' own loop, on any device.

    python docs/examples/async_stopping.py

Needs `vllm-async-spec[transformers]`. The model has random weights, so nothing is fetched.
"""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from vllm_async_spec.generation import disable, enable, generate


def main() -> None:
    """Generate three ways, and compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval().to(device)
    prompts = torch.randint(3, 64, (4, 8), device=device)
    settings = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": [2, 3, 4, 5], "pad_token_id": 0}

    torch.manual_seed(1)
    expected = model.generate(prompts, **settings)

    torch.manual_seed(1)
    handed_over = model.generate(prompts, **settings, custom_generate=generate)

    enable()
    torch.manual_seed(1)
    switched_on = model.generate(prompts, GenerationConfig(**settings, async_stopping_criteria=True))
    disable()

    print(f"{device}: {expected.shape[0]} sequences of up to {expected.shape[1] - prompts.shape[1]} new tokens")
    print(f"custom_generate: {'the same' if torch.equal(expected, handed_over) else 'other'} tokens")
    print(f"async_stopping_criteria: {'the same' if torch.equal(expected, switched_on) else 'other'} tokens")


if __name__ == "__main__":
    main()
