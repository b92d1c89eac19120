"""Generate with two slots whose steps are launched before the stop flags of the step before are read.

    python docs/examples/interleaving.py

Needs `vllm-async-spec[transformers]`. The model has random weights, so nothing is fetched. On a GPU each step is one
CUDA graph; elsewhere the same loop runs without streams and graphs, and says so.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_async_spec.generation import generate, memory_report, release


def main() -> None:
    """Generate twice, and compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval().to(device)
    prompts = torch.randint(3, 64, (4, 8), device=device)
    settings = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": [2, 3, 4, 5], "pad_token_id": 0}

    torch.manual_seed(1)
    expected = model.generate(prompts, **settings, cache_implementation="static")

    torch.manual_seed(1)
    interleaved = model.generate(prompts, **settings, custom_generate=generate, interleaved=True)

    print(f"{device}: {expected.shape[0]} sequences of up to {expected.shape[1] - prompts.shape[1]} new tokens")
    print(f"interleaved: {'the same' if torch.equal(expected, interleaved) else 'other'} tokens")
    print(f"kept for the next call: {memory_report(model).total} bytes")
    release(model)


if __name__ == "__main__":
    main()
