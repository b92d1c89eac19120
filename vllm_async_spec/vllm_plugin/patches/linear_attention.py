"""Keeps a step's metadata of linear attention (GDN_ATTN, as in Qwen3-Next), where the batch goes on.

A hybrid has several KV cache groups of linear attention. For each of them the V1 runner builds the whole metadata in
each step, by some sixty operations on tensors; before 0.20 it also waits for the device. In steady decode only two
tensors differ from those of the step before: where the states are, and how many tokens were accepted. The patch then
replaces these two. All other steps run vLLM's function.
"""

from __future__ import annotations

import copy
import functools
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.runner_choice import runner_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream import BatchMetadata
    from vllm_async_spec.vllm_plugin.upstream_batch import LinearBuilder, LinearMetadata

    Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KeptStep:
    """The metadata of a step in which each request verifies drafts, and the arguments that decided it."""

    starts: Counts
    drafts: Counts
    tokens: int
    metadata: LinearMetadata
    staged: bool
    """Whether the tensors are the builder's own, which CUDA graphs read."""

    @classmethod
    def of(
        cls, builder: LinearBuilder, batch: BatchMetadata, drafts_cpu: torch.Tensor | None, made: LinearMetadata
    ) -> KeptStep | None:
        """What to keep of a step, or None if another request than one with drafts is in it.

        Args:
            builder: which has built the metadata.
            batch: its argument.
            drafts_cpu: (requests,) int32, host: drafts of each request, -1 without; another argument.
            made: the metadata.
        """
        if drafts_cpu is None or made.spec_state_indices_tensor is None or made.num_prefills or made.num_decodes:
            return None
        counts: Counts = drafts_cpu.numpy().copy()
        staged = made.spec_state_indices_tensor.data_ptr() == builder.spec_state_indices_tensor.data_ptr()
        starts: Counts = batch.query_start_loc_cpu.numpy().copy()
        return cls(starts, counts, batch.num_actual_tokens, made, staged)

    def is_of(self, batch: BatchMetadata, drafts_cpu: torch.Tensor | None) -> bool:
        """Whether these arguments decide the same."""
        return (
            drafts_cpu is not None
            and self.tokens == batch.num_actual_tokens
            and np.array_equal(self.drafts, drafts_cpu.numpy())
            and np.array_equal(self.starts, batch.query_start_loc_cpu.numpy())
        )

    def of_next(
        self, builder: LinearBuilder, batch: BatchMetadata, blocks: torch.Tensor, accepted: torch.Tensor
    ) -> LinearMetadata:
        """The metadata of another step whose arguments decide the same.

        Args:
            builder: which has built the kept metadata.
            batch: the step's batch.
            blocks: (requests, 1 + drafts or more) int32, device: where the states are.
            accepted: (requests,) int32, device: tokens that each request has accepted.
        """
        made, requests = copy.copy(self.metadata), self.metadata.num_spec_decodes
        # Rows without drafts are padding here, which is behind all requests.
        states, accepted = blocks[:requests, : builder.num_spec + 1], accepted[:requests]
        if self.staged:
            builder.spec_state_indices_tensor[:requests].copy_(states)
            builder.num_accepted_tokens[:requests].copy_(accepted)
        else:
            made.spec_state_indices_tensor, made.num_accepted_tokens = states, accepted
            made.spec_query_start_loc = batch.query_start_loc[: requests + 1]
        return made


def _apply(transaction: Transaction, module: ModuleType) -> None:
    builder_class = module.GDNAttentionMetadataBuilder
    original = builder_class.build
    kept = weakref.WeakKeyDictionary["LinearBuilder", KeptStep | None]()
    keeping = weakref.WeakKeyDictionary["LinearBuilder", bool]()

    def keeps(builder: LinearBuilder) -> bool:
        # A subclass may change the metadata; and in the V2 runner the device may know other starts than the host.
        if builder not in keeping:
            keeping[builder] = type(builder) is builder_class and runner_of(builder.vllm_config) == "V1"
        return keeping[builder]

    @functools.wraps(original)
    def build(
        self: LinearBuilder,
        common_prefix_len: int,
        common_attn_metadata: BatchMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> LinearMetadata:
        batch, drafts = common_attn_metadata, num_decode_draft_tokens_cpu
        last = kept.get(self)
        if last is not None and num_accepted_tokens is not None and last.is_of(batch, drafts):
            mode = self.vllm_config.cache_config.mamba_cache_mode
            blocks = module.mamba_get_block_table_tensor(
                batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode
            )
            return last.of_next(self, batch, blocks, num_accepted_tokens)
        made: LinearMetadata = original(self, common_prefix_len, batch, num_accepted_tokens, drafts, fast_build)
        if keeps(self):
            kept[self] = KeptStep.of(self, batch, drafts, made)
        return made

    transaction.set(builder_class, "build", build)


IMPLEMENTATIONS = {"linear-attention": Implementation(_apply)}
