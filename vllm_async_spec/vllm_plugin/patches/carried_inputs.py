"""Prepares tokens and index tensors of the V1 runner from 0.19 on without the host's copies, where the batch goes on.

In steady decode each row of a step is that row of the step before, with all its drafts to verify. The runner still
builds nine index tensors on the host in each step, pins memory for each and copies it. The patch then takes the tokens
from the device by two copies, and reuses the index tensors of the sampler. All other steps run vLLM's functions.
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
from vllm_async_spec.vllm_plugin.patches import optimistic_runner

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream import RunnerBase, SchedulerOutput, SpecDecodeMetadata

    Counts = npt.NDArray[np.int32]


_MOST = 32
"""Kinds of steps whose indices are kept, because rows come and go; a step of 4,096 tokens has 100 kB of indices."""


class Carried:
    """What one runner keeps from step to step.

    Args:
        requests: the largest batch.
    """

    def __init__(self, requests: int) -> None:
        self._rows = np.arange(requests)
        self._drafts, self._ends = 0, self._rows + 1
        self._kept = dict[tuple[int, int], _Kept]()
        """By `_kind` of the step, the newest last."""

    def tokens_of(
        self, runner: RunnerBase, scheduled: SchedulerOutput, requests: int, ends: Counts
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The last step's sampled tokens and drafts, if this step's batch is the last step's with all its drafts.

        Args:
            runner: whose batch and drafts these are.
            scheduled: the scheduler's output.
            requests: rows of the batch.
            ends: (requests,) tokens up to the end of each row.

        Returns:
            (requests,) and (requests, drafts), on the device; None if the batch is another.
        """
        sampled, drafts = runner.input_batch.prev_sampled_token_ids, runner._draft_token_ids
        wanted = scheduled.scheduled_spec_decode_tokens
        if sampled is None or not isinstance(drafts, torch.Tensor) or len(wanted) != requests:
            return None
        if drafts.shape[1] != self._drafts:  # from 0.24 on the scheduler chooses the number of drafts
            self._drafts = drafts.shape[1]
            self._ends = (self._rows + 1) * (self._drafts + 1)
        if (
            not np.array_equal(ends, self._ends[:requests])
            or not np.array_equal(runner.prev_positions.np[:requests], self._rows[:requests])
            or set(map(len, wanted.values())) != {self._drafts}
        ):
            return None
        return sampled[:requests, 0], drafts[:requests]

    def metadata(self, drafts: Counts, ends: Counts, tokens: torch.Tensor) -> SpecDecodeMetadata | None:
        """The metadata kept by `keep`, with this step's drafts, if it is for these arguments.

        Args:
            drafts: (requests,) drafts of each row.
            ends: (requests,) tokens up to the end of each row.
            tokens: (tokens,) the step's tokens on the device.
        """
        kept = self._kept.get(_kind(drafts, ends))
        if kept is None or not kept.are_of(drafts, ends):
            return None
        made = copy.copy(kept.metadata)
        if kept.places is None:
            kept.places = made.logits_indices[made.target_logits_indices + 1]
        made.draft_token_ids = tokens[kept.places]
        return made

    def keep(self, drafts: Counts, ends: Counts, metadata: SpecDecodeMetadata) -> None:
        """Keep the metadata that vLLM made for these arguments, and drop the oldest if there are many."""
        kind = _kind(drafts, ends)
        self._kept.pop(kind, None)
        if len(self._kept) == _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[kind] = _Kept(drafts.copy(), ends.copy(), metadata)


@dataclass(slots=True)
class _Kept(optimistic_runner.KeptIndices):
    places: torch.Tensor | None = None
    """Where the drafts are among the step's tokens."""


def _kind(drafts: Counts, ends: Counts) -> tuple[int, int]:
    """Rows and tokens of a step whose rows all have the same drafts, and nothing else; zeros of any other step."""
    rows, tokens = len(ends), int(ends[-1])
    alike = tokens == rows * (int(drafts[0]) + 1) and bool((drafts == drafts[0]).all())
    return (rows, tokens) if alike else (0, 0)


def _apply(transaction: Transaction, module: ModuleType) -> None:
    runner_class = module.GPUModelRunner
    prepare, calculate = runner_class._prepare_input_ids, runner_class._calc_spec_decode_metadata
    carried = weakref.WeakKeyDictionary["RunnerBase", Carried]()

    def of(runner: RunnerBase) -> Carried:
        if runner not in carried:
            carried[runner] = Carried(runner.max_num_reqs)
        return carried[runner]

    @functools.wraps(prepare)
    def _prepare_input_ids(
        self: RunnerBase, scheduler_output: SchedulerOutput, num_reqs: int, total: int, cu_num_tokens: Counts
    ) -> None:
        tokens = None
        # Prompt embeddings bring flags of their own; with pipeline parallelism the tokens may still be on their way.
        if not self.enable_prompt_embeds and self.parallel_config.pipeline_parallel_size == 1:
            tokens = of(self).tokens_of(self, scheduler_output, num_reqs, cu_num_tokens)
        if tokens is None:
            prepare(self, scheduler_output, num_reqs, total, cu_num_tokens)
            return
        sampled, drafts = tokens
        rows = self.input_ids.gpu[:total].view(num_reqs, -1)
        rows[:, 0].copy_(sampled)
        rows[:, 1:].copy_(drafts)

    @functools.wraps(calculate)
    def _calc_spec_decode_metadata(
        self: RunnerBase, num_draft_tokens: Counts, cu_num_scheduled_tokens: Counts
    ) -> SpecDecodeMetadata:
        kept = of(self)
        made = kept.metadata(num_draft_tokens, cu_num_scheduled_tokens, self.input_ids.gpu)
        if made is None:
            made = calculate(self, num_draft_tokens, cu_num_scheduled_tokens)
            kept.keep(num_draft_tokens, cu_num_scheduled_tokens, made)
        return made

    transaction.set(runner_class, "_prepare_input_ids", _prepare_input_ids)
    transaction.set(runner_class, "_calc_spec_decode_metadata", _calc_spec_decode_metadata)


IMPLEMENTATIONS = {"carried-inputs": Implementation(_apply, optimistic_runner.unneeded)}
