"""Prepares the inputs of a step of the V1 runner from 0.19 on by one kernel, where the batch goes on.

In steady decode each row of a step is that row of the step before, with all its drafts to verify. The host then knows
nothing of the step that the device does not know better. The runner still computes tokens, positions and lengths on the
host, copies nine tensors, and corrects them on the device by a dozen small kernels. The patch launches one kernel for
all of them.

After a step in which a request ended, moved or had a prompt, the rows are others. If all of them verify all their
drafts, the patch gathers what the step before left of each, and launches the same kernel. All other steps run vLLM's
function.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_async_spec import kernels
from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.patches import optimistic_runner

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream import InputBatch, SchedulerOutput, SpecDecodeMetadata
    from vllm_async_spec.vllm_plugin.upstream_batch import CarryingRunner

    Counts = npt.NDArray[np.int32]
    Prepared = tuple[Any, ...]
    """Indices of logits, the metadata of drafts, and in some releases the most tokens sampled of a row."""


class SteadyBatch:
    """The batch of a runner's newest step, as long as steps like it may follow."""

    def __init__(self, runner: CarryingRunner) -> None:
        self._inputs = kernels.BatchInputs(
            computed=runner.num_computed_tokens,
            accepted=runner.num_accepted_tokens.gpu,
            discarded=runner.discard_request_mask.gpu,
            query_start_loc=runner.query_start_loc.gpu,
            seq_lens=runner.seq_lens,
            positions=runner.positions,
            input_ids=runner.input_ids.gpu,
        )
        self._drafts = self._ends = np.empty(0, np.int32)
        self._numbers = np.arange(1, len(runner.query_start_loc.np))
        self._more = dict[int, tuple[object, ...]]()
        """By tokens of a row, what else vLLM's function returned."""
        self.forget()

    def forget(self) -> None:
        """No step has the rows of the newest one: the runner's buffers are those of another batch."""
        self._requests = self._tokens = 0

    def _begin(self, requests: int, each: int) -> None:
        self._requests, self._tokens = requests, each
        self._drafts = np.full(requests, each - 1, np.int32)
        self._ends = self._numbers[:requests] * each

    def note(self, runner: CarryingRunner, scheduled: SchedulerOutput, tokens: Counts, made: Prepared) -> None:
        """Remember the step that vLLM has prepared, if each row has a token and the same number of drafts.

        Args:
            runner: whose step it is.
            scheduled: the scheduler's output.
            tokens: (requests,) tokens of each row.
            made: what vLLM's function returned.
        """
        self.forget()
        requests, each = len(tokens), int(tokens[0])
        if each < 2 or not _all_verify(scheduled, tokens, requests, each) or _differs(runner):
            return
        if runner.discard_request_mask.np[:requests].any():
            return
        self._begin(requests, each)
        self._more[each] = made[2:]

    def handed(
        self, runner: CarryingRunner, scheduled: SchedulerOutput, tokens: Counts
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What the newest step left on the device for this one's rows, or None if this one does not go on from it.

        It goes on if each row was in the newest step, and verifies all the drafts that were made for it. If the rows
        are not all that it had, in their places, the runner's buffers are made those of this step's rows.

        Args:
            runner: whose step it is.
            scheduled: the scheduler's output.
            tokens: (requests,) tokens of each row.

        Returns:
            Counts of accepted tokens, newest tokens and drafts, as `kernels.advance_batch` takes them.
        """
        requests, each = len(tokens), int(tokens[0])
        left = _left_on_device(runner, each)
        if left is None or each not in self._more or not _all_verify(scheduled, tokens, requests, each):
            return None
        stay = (
            (requests, each) == (self._requests, self._tokens)
            and rows_stay(runner.input_batch, requests)
            and bool((runner.prev_num_draft_tokens.np[:requests] == each - 1).all())
            and min(map(len, left)) >= requests
        )
        return left if stay else self.gathered(runner, left, requests, each)

    def gathered(
        self, runner: CarryingRunner, left: tuple[torch.Tensor, ...], requests: int, each: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What `handed` returns where rows of `left` ended, moved or had a prompt: `left`, by this step's rows."""
        batch = runner.input_batch
        if not batch.prev_req_id_to_index or runner.model_config.is_hybrid:  # up to 0.23 the host moves its counts
            return None
        names = batch.req_ids[:requests]
        rows = np.array([batch.prev_req_id_to_index.get(name, -1) for name in names])
        known = np.array([runner.requests[name].num_tokens for name in names])
        if (
            not 0 <= rows.min() <= rows.max() < min(map(len, left))
            or (batch.num_computed_tokens_cpu[:requests] + each < known).any()  # its prompt goes on
        ):
            return None
        self._begin(requests, each)
        self._take_rows(runner, rows)
        before = runner.prev_positions.gpu[:requests]
        counts, sampled, drafts = (tensor[before] for tensor in left)
        computed = self._inputs.computed[before]
        if not runner.prev_num_draft_tokens.np[rows].all():
            # A row that had a prompt is where the host says, which the kernel adds the counts to.
            runner.prev_num_draft_tokens.copy_to_gpu()
            drafted = runner.prev_num_draft_tokens.gpu[before] > 0
            exact = batch.num_computed_tokens_cpu_tensor[:requests].to(runner.device, non_blocking=True)
            counts = torch.where(drafted, counts, 1)
            computed = torch.where(drafted, computed, exact - 1)
        self._inputs.computed[:requests] = computed
        return counts, sampled, drafts

    def _take_rows(self, runner: CarryingRunner, rows: npt.NDArray[np.int_]) -> None:
        """Write what depends on the number of rows and on their places: (requests,) rows of the newest step."""
        requests, starts = self._requests, runner.query_start_loc.np
        starts[0], starts[1 : requests + 1], starts[requests + 1 :] = 0, self._ends, self._ends[-1]
        runner.optimistic_seq_lens_cpu[requests:].fill_(0)
        runner.discard_request_mask.np[:requests] = False
        runner.num_accepted_tokens.np.fill(1)
        drafts = runner.num_decode_draft_tokens
        drafts.np[:requests], drafts.np[requests:] = self._tokens - 1, -1
        drafts.copy_to_gpu()
        runner.prev_positions.np[:requests] = rows
        runner.prev_positions.copy_to_gpu(requests)

    def prepare(
        self, runner: CarryingRunner, counts: torch.Tensor, sampled: torch.Tensor, drafts: torch.Tensor
    ) -> Prepared:
        """Prepare a step from what `handed` returned; returns what vLLM's function does."""
        batch, requests, total = runner.input_batch, self._requests, self._requests * self._tokens
        batch.block_table.commit_block_table(requests)
        torch.add(
            batch.num_computed_tokens_cpu_tensor[:requests],
            self._tokens,
            out=runner.optimistic_seq_lens_cpu[:requests],
        )
        kernels.advance_batch(counts, sampled, drafts, requests, self._inputs)
        batch.block_table.compute_slot_mapping(
            requests, runner.query_start_loc.gpu[: requests + 1], runner.positions[:total]
        )
        metadata: SpecDecodeMetadata = runner._calc_spec_decode_metadata(self._drafts, self._ends)
        return metadata.logits_indices, metadata, *self._more[self._tokens]


def rows_stay(batch: InputBatch, requests: int) -> bool:
    """Whether the first rows of a batch were the same rows in the step before, and all that it had.

    Args:
        batch: after the scheduler's changes, if there were any.
        requests: how many rows; at least one.
    """
    before, names = batch.prev_req_id_to_index, batch.req_ids[:requests]
    # Rows rise, so none was left out if the last one is in its place.
    return bool(before) and list(before) == names and before[names[-1]] == requests - 1


def _left_on_device(runner: CarryingRunner, each: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Counts, newest tokens and drafts of the last step's rows, if all are on the device, with `each` - 1 drafts."""
    counts, sampled = runner.valid_sampled_token_count_gpu, runner.input_batch.prev_sampled_token_ids
    drafts = runner._draft_token_ids
    if counts is None or sampled is None or not isinstance(drafts, torch.Tensor) or drafts.shape[1] != each - 1:
        return None
    return counts, sampled, drafts


def _all_verify(scheduled: SchedulerOutput, tokens: Counts, requests: int, each: int) -> bool:
    wanted = scheduled.scheduled_spec_decode_tokens
    return len(wanted) == requests and bool((tokens == each).all()) and set(map(len, wanted.values())) == {each - 1}


def _differs(runner: CarryingRunner) -> bool:
    """Whether vLLM's function does more in this engine than the kernel."""
    parallel = runner.parallel_config
    return (
        not runner.use_async_spec_decode
        or runner.uses_mrope
        or runner.uses_xdrope_dim > 0
        or runner.supports_mm_inputs
        or runner.enable_prompt_embeds
        or runner.lora_config is not None
        or runner.dcp_world_size > 1
        or parallel.pipeline_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
        or getattr(runner, "mamba_prev_last_scheduled_idx", None) is not None
        or runner.cache_config.mamba_cache_mode != "none"
    )


def _apply(transaction: Transaction, module: ModuleType) -> None:
    runner_class = module.GPUModelRunner
    prepare, dummy = runner_class._prepare_inputs, runner_class._dummy_run
    batches = weakref.WeakKeyDictionary["CarryingRunner", SteadyBatch]()

    def of(runner: CarryingRunner) -> SteadyBatch:
        if runner not in batches:  # in a dummy run, at start-up
            kernels.compile_advance_batch(runner.device)
            batches[runner] = SteadyBatch(runner)
        return batches[runner]

    @functools.wraps(prepare)
    def _prepare_inputs(
        self: CarryingRunner, scheduler_output: SchedulerOutput, num_scheduled_tokens: Counts
    ) -> Prepared:
        batch = of(self)
        if handed := batch.handed(self, scheduler_output, num_scheduled_tokens):
            return batch.prepare(self, *handed)
        made: Prepared = prepare(self, scheduler_output, num_scheduled_tokens)
        batch.note(self, scheduler_output, num_scheduled_tokens, made)
        return made

    @functools.wraps(dummy)
    def _dummy_run(self: CarryingRunner, *args: Any, **kwargs: Any) -> Any:
        of(self).forget()
        return dummy(self, *args, **kwargs)

    transaction.set(runner_class, "_prepare_inputs", _prepare_inputs)
    transaction.set(runner_class, "_dummy_run", _dummy_run)


IMPLEMENTATIONS = {"steady-inputs": Implementation(_apply, optimistic_runner.unneeded)}
