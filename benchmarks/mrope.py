"""A text-only Llama with M-RoPE: three axes that differ over the prompt, without images or a processor.

All of vLLM's models with M-RoPE take images and need a processor. A runner's work for M-RoPE depends on two things
only, both here: a model that gives its positions, and a rotary embedding of three axes.
"""

from typing import Any

import torch

ARCHITECTURE = "MRopeLlamaForCausalLM"

_ROW = 5
"""Tokens in a row of the picture that the prompt is read as."""


def positions(tokens: int) -> tuple[torch.Tensor, int]:
    """M-RoPE positions of a prompt of so many tokens that is read as one picture.

    Returns:
        (3, tokens) int64 positions in time, height and width; and the first position after the prompt, the same on all
        axes, minus `tokens`: negative, as after a picture.
    """
    index = torch.arange(tokens)
    axes = torch.stack((index // _ROW**2, index // _ROW, index % _ROW))
    return axes, int(axes.max()) + 1 - tokens


def register() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class MRopeLlamaForCausalLM(LlamaForCausalLM, SupportsMRoPE):  # type: ignore[misc]  # vLLM is not typed here
        def get_mrope_input_positions(self, input_tokens: list[int], *_: Any, **__: Any) -> tuple[torch.Tensor, int]:
            return positions(len(input_tokens))

    ModelRegistry.register_model(ARCHITECTURE, MRopeLlamaForCausalLM)
