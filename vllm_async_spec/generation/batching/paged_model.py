"""A model whose keys and values are in pages: one call, from tokens to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.batching.attention_backends import AttentionBackend
from vllm_async_spec.generation.batching.attention_function import Attend, Forward, at_work
from vllm_async_spec.generation.batching.model_check import takes_logits_to_keep
from vllm_async_spec.generation.batching.paged_cache import PagedCache
from vllm_async_spec.generation.batching.step_slots import PrefillInputs
from vllm_async_spec.metadata import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A causal language model of transformers, with its paged cache and attention backend."""

    model: Any
    cache: PagedCache
    backend: AttentionBackend
    keeps: bool
    """Whether the model takes `logits_to_keep`."""
    forward: Callable[..., Any]
    """The forward for decodes, compiled if requested."""

    @classmethod
    def of(
        cls, model: Any, cache: PagedCache, backend: AttentionBackend, *, compile_with: dict[str, Any] | None = None
    ) -> PagedModel:
        """Make a `PagedModel`; `compile_with` holds arguments of `torch.compile`, or is None."""
        forward = model if compile_with is None else torch.compile(model.forward, dynamic=False, **compile_with)
        return cls(model, cache, backend, takes_logits_to_keep(model), forward)

    def decode(
        self,
        metadata: CommonAttentionMetadata,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of a batch of decodes, padded to one of a few sizes; may be captured in a CUDA graph.

        Tokens and positions are (tokens,) int64. `wanted` is (rows,) int64, indices into the tokens; None means all.

        Returns:
            (rows, vocabulary), or (tokens, vocabulary).
        """
        attend = self.backend.decode(metadata)
        return self._logits(self.forward, metadata, attend, tokens, positions, wanted)

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, inputs: PrefillInputs) -> torch.Tensor:
        """Logits of the last token of each prompt, or of each prompt chunk: (rows, vocabulary).

        `host` and `inputs` hold the same inputs, on the host and on the device.
        """
        tokens, rows = metadata.num_actual_tokens, metadata.num_reqs
        attend = self.backend.prefill(metadata, host, inputs)
        return self._logits(
            self.model, metadata, attend, inputs.tokens[:tokens], inputs.positions[:tokens], inputs.last[:rows]
        )

    def _logits(
        self,
        forward: Callable[..., Any],
        metadata: CommonAttentionMetadata,
        attend: Attend,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits of a batch; the forward also writes its keys and values to the cache."""
        keep = {"logits_to_keep": wanted} if wanted is not None and self.keeps else {}
        with at_work(Forward(self.cache, metadata.slot_mapping, attend)):
            logits: torch.Tensor = forward(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        return logits if wanted is None or self.keeps else logits.index_select(0, wanted)
