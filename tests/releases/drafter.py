"""vLLM's own EAGLE proposer, drafting with a small Llama over a paged cache in plain PyTorch.

EAGLE gives each position the token after it, so the model reads the sequence without its first token.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_async_spec.attention.reference import ReferenceArguments, paged_attention
from vllm_async_spec.demo.model import ModelShape, TinyLlama, _rotate, _rotation

PAGE = 16
PAGES = 32
"""Of each request."""


def model_and_drafter(noise: float) -> tuple[TinyLlama, TinyLlama]:
    """A random model, and a drafter that is the same but for some noise, so that it is often right."""
    source = torch.Generator().manual_seed(0)
    shape = ModelShape(hidden=128, heads=2, layers=2, intermediate=256)
    target, drafter = TinyLlama(shape), TinyLlama(shape)
    target.initialise(source)
    drafter.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += torch.randn(weight.shape, generator=source) * weight.std() * noise
    return target.requires_grad_(False), drafter.requires_grad_(False)


def greedy(model: TinyLlama, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(tokens) - count :]


class PagedDrafter:
    """Runs `model` on a flat batch with paged keys and values, attending as the metadata says."""

    def __init__(self, model: TinyLlama, requests: int) -> None:
        shape = model.shape
        self._model = model
        size = (requests * PAGES, PAGE, shape.heads, shape.head_dim)
        # Whatever is read before it was written is loud.
        self._caches = [(torch.full(size, 3.0), torch.full(size, 3.0)) for _ in range(shape.layers)]
        self.metadata: Any = None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, decoder = self.metadata, self._model.model
        x = decoder.embed_tokens(input_ids.long())
        rotation = _rotation(positions[None], decoder.head_dim, x.dtype)
        for layer, caches in zip(decoder.layers, self._caches, strict=True):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), rotation, caches, metadata)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out = decoder.norm(x)
        return out, out

    def _attend(self, layer: Any, x: torch.Tensor, rotation: Any, caches: Any, metadata: Any) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1)[None]
            for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k, v = (each[0].transpose(0, 1) for each in (_rotate(q, rotation), _rotate(k, rotation), v))
        for cache, new in zip(caches, (k, v), strict=True):
            kept = metadata.slot_mapping >= 0
            cache.flatten(0, 1)[metadata.slot_mapping[kept]] = new[: len(kept)][kept]
        arguments = ReferenceArguments(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table_tensor,
            metadata.max_query_len,
            int(metadata.seq_lens.max()),
            True,
        )
        mixed: torch.Tensor = layer.o_proj(paged_attention(q, *caches, arguments).flatten(-2))
        return mixed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits


class Builder:
    """Takes the metadata as it is at this moment; what a kernel would be given."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "max_query_len")
        built = SimpleNamespace(**{name: getattr(common_attn_metadata, name) for name in names})
        self.lengths.append(built.seq_lens.tolist())
        return built


def proposer(module: ModuleType, drafter: TinyLlama, requests: int, drafts: int) -> Any:
    tokens = 4096
    made = module.EagleProposer.__new__(module.EagleProposer)
    attributes = {
        "method": "eagle",
        "hidden_size": drafter.shape.hidden,
        "runner": object(),
        "model": PagedDrafter(drafter, requests),
        "attn_metadata_builder": Builder(),
        "draft_indexer_metadata_builder": None,
        "attn_layer_names": ["drafter"],
        "indexer_layer_names": [],
        "num_speculative_tokens": drafts,
        "use_cuda_graph": False,
        "dp_rank": 0,
        "uses_mrope": False,
        "supports_mm_inputs": False,
        "allowed_attn_types": None,
        "max_model_len": PAGE * PAGES,
        "block_size": PAGE,
        "vllm_config": None,
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "hidden_states": torch.zeros(tokens, drafter.shape.hidden),
        "arange": torch.arange(tokens, dtype=torch.int32),
        "token_arange_np": np.arange(tokens),
        "_pad_batch_across_dp": lambda num_tokens_unpadded, num_tokens_padded: (num_tokens_padded, None),
    }
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@contextlib.contextmanager
def forward_context(module: ModuleType, made: Any) -> Iterator[None]:
    """Within, what `propose` sets as a step's metadata is what the drafter attends by."""

    @contextlib.contextmanager
    def given(per_layer: dict[str, Any], *_: Any, **__: Any) -> Iterator[None]:
        made.model.metadata = per_layer["drafter"]
        yield

    original = module.set_forward_context
    module.set_forward_context = given  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.set_forward_context = original  # type: ignore[attr-defined]
