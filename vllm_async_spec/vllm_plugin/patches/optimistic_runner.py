"""Removes the wait for accepted counts from vLLM's V1 runner: the host assumes, and the device corrects.

Up to 0.18 the runner computes positions, lengths and slots on the host. So each step begins with a wait until the
device has verified the last step's drafts; then the runner subtracts rejected tokens. The subclass answers at once that
nothing was rejected. vLLM prepares the step from this answer, and the device writes exact values over its inputs. The
scheduler knows the exact number of tokens one step later, so the host is ahead by at most one step's drafts.

If a batch needs exact counts on the host (see `exact_counts`), the step waits for them. The wait is counted with its
reason, and the host's values are corrected from the device's. The next step is optimistic again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_async_spec.host_lengths import host_values_of
from vllm_async_spec.kernels import PagedGroup, StepInputs
from vllm_async_spec.patching import Transaction
from vllm_async_spec.spec_decode import DeviceProgress, PolledEvent, RotatingBuffer
from vllm_async_spec.sync_policy import ReadKind, host_read, record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.patches.exact_counts import always_needed, needed_by
from vllm_async_spec.vllm_plugin.upstream import MultiGroupBlockTable, RunnerBase, SchedulerOutput, SpecDecodeMetadata

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import BatchMetadata

_CLASS = "GPUModelRunner"


def unneeded() -> str | None:
    """The reason why this platform's runner needs no patch, or None."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cuda() else "the platform is not CUDA"


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.set_function(module, _CLASS, _optimistic(getattr(module, _CLASS)))


@dataclass(slots=True)
class KeptIndices:
    """The result of `_calc_spec_decode_metadata` and its arguments; later steps replace the draft tokens."""

    drafts: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    metadata: SpecDecodeMetadata

    def are_of(self, drafts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]) -> bool:
        """Whether the result is for these arguments."""
        return np.array_equal(self.drafts, drafts) and np.array_equal(self.ends, ends)


def _paged_groups(block_table: MultiGroupBlockTable) -> list[PagedGroup]:
    """The KV cache groups of a `MultiGroupBlockTable`."""
    return [
        PagedGroup(table.block_table.gpu, table.block_size, table.slot_mapping.gpu)
        for table in block_table.block_tables
    ]


class OptimisticRunner(RunnerBase):
    """The subclass's own methods, which extend those of vLLM's runner."""

    _schedule: SchedulerOutput
    """The scheduler's output for the step in preparation."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._progress: DeviceProgress | None = None
        self._always_exact: str | None = None
        self._exact: str | None = None
        self._num_drafts: npt.NDArray[np.int32] | None = None
        self._indices: KeptIndices | None = None

    def _update_states(self, scheduler_output: SchedulerOutput) -> object:
        self._schedule = scheduler_output
        return super()._update_states(scheduler_output)

    def _get_valid_sampled_token_count(self) -> list[int]:
        sampled = self.input_batch.prev_sampled_token_ids
        if self.valid_sampled_token_count_event is None or sampled is None:
            return []
        progress, reason = self._progress, self._always_exact or self._exact
        if progress is not None and (reason is None or not progress.drafted):
            return progress.most_counts(sampled.shape[0])
        if reason is not None:
            record_fallback(reason)
        with host_read("accepted counts", 8 * sampled.shape[0], ReadKind.EVENT):
            counts: list[int] = super()._get_valid_sampled_token_count()
        return counts if progress is None else self._reconciled(counts, progress.fetched())

    def _reconciled(self, counts: list[int], began: list[int]) -> list[int]:
        """Counts from which vLLM computes exact values. Also removes surplus placeholders from each request's output.

        vLLM subtracts rejected tokens from the scheduler's number, and adds placeholders for accepted tokens. But the
        scheduler's number is already exact if the engine has seen the step's result. And an optimistic step leaves too
        many placeholders. The batch counts them, and vLLM fails if that count exceeds the longest sequence.
        """
        cached, batch = self._schedule.scheduled_cached_reqs, self.input_batch
        previous = batch.prev_req_id_to_index
        for request_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            row, request = previous.get(request_id), self.requests[request_id]
            if row is None or not request.prev_num_draft_len:
                continue
            ahead = computed - (began[row] + counts[row])
            kept = outputs - ahead - (counts[row] - 1)
            del request.output_token_ids[kept:]
            now = batch.req_id_to_index[request_id]
            batch.num_tokens_no_spec[now] = min(batch.num_tokens_no_spec[now], batch.num_prompt_tokens[now] + kept)
            counts[row] = request.prev_num_draft_len + 1 - ahead
        return counts

    def _copy_valid_sampled_token_count(
        self, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
    ) -> None:
        if self._progress is None:
            super()._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)
            return
        self._progress.sampled(valid_sampled_tokens_count)
        self._backup_tokens.turn()
        if self._exact is None:
            # Nothing reads the counts on the host, so only this part of vLLM's method is needed.
            self.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)
        else:
            super()._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: npt.NDArray[np.int32], cu_num_scheduled_tokens: npt.NDArray[np.int32]
    ) -> SpecDecodeMetadata:
        self._num_drafts = num_draft_tokens
        if self._indices is not None and self._indices.are_of(num_draft_tokens, cu_num_scheduled_tokens):
            return copy.copy(self._indices.metadata)
        made = super()._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)
        if self._progress is not None:
            self._indices = KeptIndices(num_draft_tokens.copy(), cu_num_scheduled_tokens.copy(), made)
        return made

    def _prepare_input_ids(
        self, scheduler_output: SchedulerOutput, total_num_scheduled_tokens: int, cu_num_tokens: npt.NDArray[np.int32]
    ) -> None:
        batch = self.input_batch
        if self._progress is None or batch.prev_sampled_token_ids is None:
            super()._prepare_input_ids(scheduler_output, total_num_scheduled_tokens, cu_num_tokens)
            return
        # The correction writes the last step's sampled and drafted tokens. Copy the host's only if there are others.
        carried = sum(map(batch.prev_req_id_to_index.__contains__, batch.req_ids))
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        if carried + drafts < total_num_scheduled_tokens:
            self.input_ids.copy_to_gpu(total_num_scheduled_tokens)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None]:
        self._num_drafts = None
        made = super()._prepare_inputs(scheduler_output, *args, **kwargs)
        self._settle()
        if self._progress is not None:
            self._correct_inputs(made[1])
        return made

    def _dummy_sampler_run(self, *args: object, **kwargs: object) -> torch.Tensor:
        made = super()._dummy_sampler_run(*args, **kwargs)
        # vLLM calls this at the end of warm-up, and earlier at the end of memory profiling, without a KV cache.
        if self.attn_groups:
            self._settle()
        if self._progress is not None:
            # Correcting an unknown row changes nothing, but compiles the kernel, so that no request waits for it.
            self._correct(self._progress, ["warm-up"], {}, np.zeros(1, dtype=np.int32), None)
        return made

    def _settle(self) -> None:
        """Decide once whether steps may be optimistic, and allocate their buffers."""
        if self.valid_sampled_token_count_event is None or self._progress is not None:
            return
        if self._always_exact is None:
            self._always_exact = always_needed(self)
        if self._always_exact is None:
            self._become_optimistic()

    def _become_optimistic(self) -> None:
        self._progress = DeviceProgress(self.max_num_reqs, self.device)
        self._backup_tokens = RotatingBuffer(self.drafter.backup_next_token_ids, self.device)
        masks = self.is_mm_embed_buffers if self.supports_mm_inputs else ()
        self._embedding_masks = [RotatingBuffer(mask, self.device) for mask in masks]
        self._table: MultiGroupBlockTable | None = None
        self._verified = torch.empty(self.max_num_tokens, dtype=torch.int32, device=self.device)
        # For steps after one that sampled or drafted no tokens.
        rows = self.max_num_reqs
        self._none_sampled = torch.zeros(1, 1, dtype=torch.int32, device=self.device).expand(rows, 1)
        self._none_drafted = torch.zeros(1, 1, dtype=torch.int64, device=self.device).expand(rows, self.num_spec_tokens)
        # Cascade attention derives the common prefix from the host's computed tokens, which are optimistic.
        self.cascade_attn_enabled = False
        self.prepare_inputs_event: object = PolledEvent(self.prepare_inputs_event, "prepared inputs")

    def _correct_inputs(self, metadata: SpecDecodeMetadata | None) -> None:
        """Correct the step's inputs on the device, and start a copy if the next step needs exact counts.

        Args:
            metadata: tells which tokens are drafts, and gets their tokens; None if there are no drafts.
        """
        progress, batch = self._progress, self.input_batch
        assert progress is not None
        came_from = {} if batch.prev_sampled_token_ids is None else batch.prev_req_id_to_index
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs]
        self._correct(progress, batch.req_ids, came_from, computed, self._num_drafts)
        if metadata is not None:
            metadata.draft_token_ids = self._verified[: metadata.draft_token_ids.shape[0]]
        self._exact = needed_by(batch)
        if self._exact is not None:
            progress.fetch(batch.num_reqs)

    def _correct(
        self,
        progress: DeviceProgress,
        requests: Sequence[str],
        came_from: Mapping[str, int],
        computed: npt.NDArray[np.int32],
        drafts: npt.NDArray[np.int32] | None,
    ) -> None:
        """Let the device write exact values over the host's inputs of these requests."""
        sampled, drafted = self.input_batch.prev_sampled_token_ids, self._draft_token_ids
        progress.correct(
            requests,
            came_from,
            computed,
            drafts,
            self._none_sampled if sampled is None else sampled.int(),
            drafted.long() if isinstance(drafted, torch.Tensor) else self._none_drafted,
            self._step_inputs(),
        )

    def _position_axes(self) -> torch.Tensor | None:
        if self.uses_mrope:
            axes: torch.Tensor = self.mrope_positions.gpu
        elif self.uses_xdrope_dim > 0:
            axes = self.xdrope_positions.gpu
        else:
            return None
        return axes

    def _step_inputs(self) -> StepInputs:
        table = self.input_batch.block_table
        if self._table is not table:  # first call, or vLLM made a new input batch
            self._table = table
            self._inputs = StepInputs(
                query_start_loc=self.query_start_loc.gpu,
                input_ids=self.input_ids.gpu,
                verified=self._verified,
                positions=self.positions.gpu,
                seq_lens=self.seq_lens.gpu,
                axes=self._position_axes(),
                paged=_paged_groups(table),
            )
        return self._inputs

    def _gather_mm_embeddings(self, *args: object, **kwargs: object) -> object:
        made = super()._gather_mm_embeddings(*args, **kwargs)
        if self._progress is not None:
            # vLLM alternates between two masks, for target and drafter, and no wait protects their copies.
            self._embedding_masks[self.is_mm_embed_idx].turn()
        return made

    def _build_attention_metadata(self, *args: object, **kwargs: object) -> tuple[object, BatchMetadata | None]:
        made = super()._build_attention_metadata(*args, **kwargs)
        drafting = made[1]
        if drafting is not None and not kwargs.get("use_spec_decode"):
            # Draft steps add to these runner buffers in place, perhaps before their copies to the device have run.
            with host_values_of(drafting):
                for name in ("_seq_lens_cpu", "_num_computed_tokens_cpu"):
                    host = getattr(drafting, name)
                    setattr(drafting, name, None if host is None else host.clone())
        return made


def _optimistic(upstream: type) -> type:
    """The subclass of vLLM's runner, under the same name."""
    names = {"__module__": upstream.__module__, "__qualname__": upstream.__qualname__}
    return type(upstream.__name__, (OptimisticRunner, upstream), names)


IMPLEMENTATIONS = {"optimistic-runner": Implementation(_apply, unneeded)}
