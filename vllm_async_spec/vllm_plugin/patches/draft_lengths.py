"""Keeps the draft steps of vLLM 0.12 and 0.13 from attending to rejected tokens.

With padded drafter batches the first draft step runs over all verified tokens, and samples from the last accepted one.
Later draft steps have the right positions and slots, but their lengths still count rejected tokens. So they attend to
keys of tokens that don't exist, and fewer drafts are accepted. Later releases subtract the rejected tokens before the
second step. The patch does the same, on the device and on a copy.
"""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_async_spec.host_lengths import Trust, host_values_of
from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    import torch

    from vllm_async_spec.vllm_plugin.upstream_batch import DraftingBuilder, EagleProposer, GraftedMetadata

_HOST_SHADOWS = ("_seq_lens_cpu", "_num_computed_tokens_cpu")


class _Builder:
    """The drafter's metadata builder during one call of `propose`."""

    def __init__(self, builder: DraftingBuilder, rejected: torch.Tensor) -> None:
        self._builder = builder
        self._rejected = rejected

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def build_for_drafting(self, common_attn_metadata: GraftedMetadata, draft_index: int) -> object:
        given = common_attn_metadata
        if draft_index == 0:
            with host_values_of(given):
                for name in _HOST_SHADOWS:
                    # 0.13 adds to these runner buffers in place, perhaps before their copies to the device have run.
                    if (host := getattr(given, name, None)) is not None:
                        setattr(given, name, host.clone())
        elif draft_index == 1:
            # vLLM sets the length of a request past the maximum to 1, so subtracting may pass below 1.
            given.seq_lens = (given.seq_lens - self._rejected).clamp_(min=1)
        if draft_index > 0 and getattr(given, "host_trust", None) is Trust.RENEWED:
            # 0.12's host lengths still count rejected tokens; a builder that reads lengths copies the device's.
            given = copy.copy(given)
            given.seq_lens_changed()
        return self._builder.build_for_drafting(common_attn_metadata=given, draft_index=draft_index)


def _apply(transaction: Transaction, module: ModuleType) -> None:
    proposer = module.EagleProposer
    original = proposer.propose

    @functools.wraps(original)
    def propose(
        self: EagleProposer,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        last_token_indices: torch.Tensor | None,
        common_attn_metadata: GraftedMetadata,
        *rest: Any,
        **more: Any,
    ) -> object:
        given = self.attn_metadata_builder
        if last_token_indices is not None and self.num_speculative_tokens > 1:
            rejected = common_attn_metadata.query_start_loc[1:] - 1 - last_token_indices
            self.attn_metadata_builder = _Builder(given or self._get_attention_metadata_builder(), rejected)
        try:
            return original(
                self,
                target_token_ids,
                target_positions,
                target_hidden_states,
                next_token_ids,
                last_token_indices,
                common_attn_metadata,
                *rest,
                **more,
            )
        finally:
            self.attn_metadata_builder = given

    transaction.set(proposer, "propose", propose)


IMPLEMENTATIONS = {"draft-lengths": Implementation(_apply)}
