"""Models for the continuous batching benchmark: random weights, and a drafter with a set share of accepted drafts.

With drafts, `acceptance` arranges the weights of both models; shapes and drafters are those of the vLLM benchmarks. The
next token then depends on the last token alone, by a margin that no rounding reaches. So tokens can be compared in
bfloat16 too, but they show nothing about attention.
"""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.acceptance import arrange
from benchmarks.shapes import SHAPES, Method

SHARE = 0.7
"""Probability that a draft is accepted, given that those before it were."""
_DUMMY = 5e-4
"""Standard deviation of the weights, small enough that arranged embeddings dominate whatever the layers add."""


def make_model(size: str, device: str, *, arranged: bool) -> Any:
    """A Llama of this size, bfloat16 on a GPU and float32 elsewhere, that can't generate its end-of-sequence id."""
    return _llama(SHAPES[size].target, device, seed=0, share=SHARE if arranged else None)


def make_drafter(size: str, device: str) -> Any:
    """The small Llama that drafts for the arranged model of this size."""
    config = SHAPES[size].drafters[Method.DRAFT_MODEL]
    assert config is not None
    return _llama(config, device, seed=1, share=SHARE, votes=True)


def twin(model: Any) -> Any:
    """A model that shares the weights' memory and can use another attention implementation."""
    return copy.deepcopy(model, {id(each): each for each in itertools.chain(model.parameters(), model.buffers())})


def _llama(config: Mapping[str, Any], device: str, *, seed: int, share: float | None, votes: bool = False) -> Any:
    import transformers

    made = transformers.LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"})
    if share is not None:
        made.initializer_range = _DUMMY
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = transformers.LlamaForCausalLM(made).eval()
    finally:
        torch.set_default_dtype(before)
    if share is not None:
        arrange(model, made.vocab_size, share, votes=votes)
    model.generation_config = transformers.GenerationConfig(eos_token_id=made.vocab_size, pad_token_id=0)
    return model
