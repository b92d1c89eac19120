"""A Llama with M-RoPE and nothing to look at: three axes that differ over the prompt, without images or a processor.

vLLM's models with M-RoPE all take images, and want a processor to make sense of them. What a runner does for M-RoPE
depends on two things only, which are here: a model that says its positions, and a rotary embedding of three axes.
"""

from __future__ import annotations

from typing import Any

import torch

ARCHITECTURE = "MRopeLlamaForCausalLM"

_ROW = 5
"""Tokens of a row, were the prompt a picture."""


def positions(tokens: int) -> tuple[torch.Tensor, int]:
    """Of a prompt that is read as one picture.

    Args:
        tokens: of the prompt.

    Returns:
        (3, tokens) int64 positions in time, height and width, and what the first position after them, which is the
        same on all axes, is ahead of the number of tokens. It is negative, as it is after a picture.
    """
    index = torch.arange(tokens)
    axes = torch.stack((index // _ROW**2, index // _ROW, index % _ROW))
    return axes, int(axes.max()) + 1 - tokens


def register() -> None:
    """Have vLLM know the model, in this process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class MRopeLlamaForCausalLM(LlamaForCausalLM, SupportsMRoPE):  # type: ignore[misc]  # vLLM is not typed here
        def get_mrope_input_positions(self, input_tokens: list[int], *_: Any, **__: Any) -> tuple[torch.Tensor, int]:
            return positions(len(input_tokens))

    ModelRegistry.register_model(ARCHITECTURE, MRopeLlamaForCausalLM)
