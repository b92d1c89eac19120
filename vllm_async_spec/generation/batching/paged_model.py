"""A model whose keys and values are in pages: one call of it, from tokens to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.batching.attention import Attend, Forward, at_work
from vllm_async_spec.generation.batching.kernels import Kernels
from vllm_async_spec.generation.batching.model_check import takes_logits_to_keep
from vllm_async_spec.generation.batching.paged_cache import PagedCache


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A causal language model of transformers that attends through our function, its cache and its kernels."""

    model: Any
    cache: PagedCache
    kernels: Kernels
    keeps: bool
    """Whether it can be told which tokens' logits are wanted."""
    decodes: Callable[..., Any]
    """Its forward for decodes, compiled if it is to be."""

    @classmethod
    def of(
        cls, model: Any, cache: PagedCache, kernels: Kernels, *, compile_with: dict[str, Any] | None = None
    ) -> PagedModel:
        """The same, having asked the model what it can be told; with arguments of `torch.compile`, or None."""
        decodes = model if compile_with is None else torch.compile(model.forward, dynamic=False, **compile_with)
        return cls(model, cache, kernels, takes_logits_to_keep(model), decodes)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        *,
        decodes: bool,
    ) -> torch.Tensor:
        """Logits of a batch, whose keys and values are written on the way.

        Args:
            tokens: (tokens,) int64.
            positions: (tokens,) int64.
            slot_mapping: (tokens,) int64: where its keys and values are written.
            attend: how it attends.
            wanted: (rows,) int64, among `tokens`; all if None.
            decodes: whether it is a batch of decodes, which come in few sizes; prompts come in any.

        Returns:
            (rows, vocabulary), or (tokens, vocabulary).
        """
        keep = {"logits_to_keep": wanted} if wanted is not None and self.keeps else {}
        forward = self.decodes if decodes else self.model
        with at_work(Forward(self.cache, slot_mapping, attend)):
            logits: torch.Tensor = forward(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        return logits if wanted is None or self.keeps else logits.index_select(0, wanted)
