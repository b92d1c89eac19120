"""Generate many sequences at once, each joining and leaving when it does: the same tokens as alone, on any device.

And the same again with a draft model, several in a step.

    python docs/examples/continuous_batching.py

Needs `vllm-async-spec[transformers]`. The model has random weights, so nothing is fetched.
"""

import asyncio
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher

END = [2, 3, 4]


async def show(batcher: ContinuousBatcher, prompt: list[int]) -> None:
    """Print the tokens of one request as they arrive."""
    tokens = [token async for token in batcher.stream(prompt, max_new_tokens=12)]
    print(f"streamed {len(tokens)} tokens after a prompt of {len(prompt)}: {tokens}")


async def show_all(batcher: ContinuousBatcher, prompts: list[list[int]]) -> None:
    """Stream several at once; they share the batcher's steps."""
    await asyncio.gather(*(show(batcher, prompt) for prompt in prompts))


def main() -> None:
    """Generate in three ways, and compare with one sequence after the other."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval().to(device)
    prompts = [torch.randint(5, 64, (length,)).tolist() for length in (3, 9, 1, 30, 5, 17)]

    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        made = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=END, pad_token_id=0)
        expected.append(made[0, len(prompt) :].tolist())

    config = BatcherConfig(max_batch=4, max_length=128, eos_token_id=END)
    with ContinuousBatcher(model, config=config) as batcher:
        requests = [batcher.submit(prompt, max_new_tokens=40) for prompt in prompts]
        batcher.run()
        same = [request.result() for request in requests] == expected
        print(f"{device}, {batcher.attention}: {len(requests)} requests, {'the same' if same else 'other'} tokens")
        asyncio.run(show_all(batcher, prompts[:3]))

    drafter = copy.deepcopy(model)  # a smaller model, in earnest
    with torch.no_grad():
        drafter.lm_head.weight += 0.2 * drafter.lm_head.weight.std() * torch.randn_like(drafter.lm_head.weight)
    with ContinuousBatcher(model, config=config, draft_model=drafter) as batcher:
        requests = [batcher.submit(prompt, max_new_tokens=40) for prompt in prompts]
        batcher.run()
        same = [request.result() for request in requests] == expected
        print(f"with a draft model: {'the same' if same else 'other'} tokens, {batcher.accepted:.1f} in a step")


if __name__ == "__main__":
    main()
