"""Keeps the host's account of requests in the V1 runner from 0.21 on with less Python, where the batch goes on.

Before each step the runner takes over what the scheduler says of each request, in a loop of a hundred lines. In steady
decode the step has the same requests as the step before, each with all its drafts. Then the patch does the same with a
shorter loop, and with one operation on all rows for what NumPy holds. All other steps run vLLM's function.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.patches import optimistic_runner, steady_inputs

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_async_spec.vllm_plugin.upstream_batch import AccountBatch, AccountedStep, AccountingRunner, RequestAccount

    Counts = npt.NDArray[np.int_]

_FEWEST = 16
"""Requests from which on the operations on all rows take less time than vLLM's loop."""
_ELSE = ("new_block_ids_to_zero", "kv_cache_block_copies", "free_encoder_mm_hashes")
"""What else a scheduler may ask of vLLM's function, where the release has it."""


class SteadyStates:
    """The requests of a runner's newest step, as long as steps of the same requests follow."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The next step's requests are looked up anew."""
        self._names: list[str] = []
        """In the scheduler's order, as all that follows."""
        self._order: list[str] = []
        """Names in the order of the batch's rows."""
        self._rows = np.empty(0, np.intp)
        self._states: list[RequestAccount] = []
        self._outputs: list[list[int]] = []
        self._drafts = 0
        self._held: list[list[int]] = []
        """The batch's lists of drafts. vLLM writes into them, too."""
        self._asked: list[list[int]] = []
        self._tokens = np.empty((0, 0), np.int32)
        """The same as an array."""

    def goes_on(self, runner: AccountingRunner, scheduled: AccountedStep) -> bool:
        """Whether the step has the requests of the runner's batch, all of which had and have the same drafts."""
        known, wanted = scheduled.scheduled_cached_reqs, scheduled.scheduled_spec_decode_tokens
        batch, requests = runner.input_batch, len(known.req_ids)
        if (
            requests < _FEWEST
            or scheduled.scheduled_new_reqs
            or scheduled.finished_req_ids
            or known.resumed_req_ids
            or any(getattr(scheduled, name, None) for name in _ELSE)
            or not len(wanted) == requests == batch.num_reqs
            or not steady_inputs.rows_stay(batch, requests)
            or _differs(runner)
        ):
            return False
        if self._order != batch.req_ids or self._names != known.req_ids:
            self._look_up(runner, known.req_ids)
        return self._drafts > 0 and set(map(len, wanted.values())) == {self._drafts}

    def _look_up(self, runner: AccountingRunner, names: Iterable[str]) -> None:
        batch = runner.input_batch
        self.forget()
        self._names, self._order = list(names), list(batch.req_ids)
        rows = [batch.req_id_to_index.get(name, -1) for name in self._names]
        self._rows = np.array(rows, np.intp)
        self._states = [runner.requests[name] for name in self._names]
        self._outputs = [state.output_token_ids for state in self._states]
        self._held = [batch.spec_token_ids[row] for row in rows]
        drafted = {state.prev_num_draft_len for state in self._states}
        self._drafts = drafted.pop() if len(drafted) == 1 and -1 not in rows else 0

    def advance(self, runner: AccountingRunner, scheduled: AccountedStep) -> Callable[[], None]:
        """Take over what the scheduler says of a step that `goes_on`.

        Returns:
            A function that subtracts the drafts that the step before rejected, as vLLM's does.
        """
        known, batch, rows = scheduled.scheduled_cached_reqs, runner.input_batch, self._rows
        runner.prev_num_draft_tokens.np.fill(0)
        runner.prev_num_draft_tokens.np[rows] = self._drafts
        for state, computed in zip(self._states, known.num_computed_tokens, strict=True):
            state.num_computed_tokens = computed
        batch.num_computed_tokens_cpu[rows] = known.num_computed_tokens
        self._take_over_outputs(batch, np.array(known.num_output_tokens))
        for number, blocks in enumerate(known.new_block_ids):
            if blocks is not None:
                for ids, more in zip(self._states[number].block_ids, blocks, strict=True):
                    ids.extend(more)
                batch.block_table.append_row(blocks, int(rows[number]))
        self._take_over_drafts(batch, [*map(scheduled.scheduled_spec_decode_tokens.__getitem__, self._names)])
        states, drafts = self._states, self._drafts
        batch.condense()
        runner._may_reorder_batch(scheduled)
        batch.refresh_metadata()
        now = rows
        if batch.req_ids != self._order:
            now = np.array([batch.req_id_to_index[name] for name in self._names], np.intp)
            self.forget()

        def correct() -> None:
            counts = runner._get_valid_sampled_token_count()
            if not counts or not batch.prev_req_id_to_index:
                return
            rejected = drafts + 1 - np.array(counts)[rows]
            batch.num_computed_tokens_cpu[now] -= rejected
            for state, fewer in zip(states, rejected.tolist(), strict=True):
                if fewer:
                    state.num_computed_tokens -= fewer

        return correct

    def _take_over_outputs(self, batch: AccountBatch, counts: Counts) -> None:
        """Lengthen each list as if all drafts had been accepted, but not beyond what the scheduler counts."""
        held = np.fromiter(map(len, self._outputs), np.intp, len(self._outputs))
        optimistic = held + self._drafts
        for output, more in zip(self._outputs, (np.minimum(counts, optimistic) - held).tolist(), strict=True):
            if more > 0:
                output += [-1] * more
            elif more:
                del output[more:]
        cut = counts < optimistic  # the scheduler has heard of rejections
        rows = self._rows[cut]
        batch.num_tokens_no_spec[rows] = batch.num_prompt_tokens[rows] + counts[cut]

    def _take_over_drafts(self, batch: AccountBatch, asked: list[Sequence[int]]) -> None:
        if self._held != asked:
            for held, wanted in zip(self._held, asked, strict=True):
                held[:] = wanted
        if self._asked != asked:
            self._asked = [list(each) for each in asked]
            self._tokens = np.array(asked, batch.token_ids_cpu.dtype)
        rows = self._rows[:, None]
        places = batch.num_tokens_no_spec[rows] + np.arange(self._drafts)
        batch.token_ids_cpu[rows, places] = self._tokens
        batch.is_token_ids[rows, places] = True


def _differs(runner: AccountingRunner) -> bool:
    """Whether vLLM's function does more in this engine."""
    speculation = runner.speculative_config
    return (
        not runner.use_async_spec_decode
        or speculation is None
        or speculation.method == "ngram_gpu"
        or runner.parallel_config.pipeline_parallel_size > 1
    )


def _apply(transaction: Transaction, module: ModuleType) -> None:
    runner_class = module.GPUModelRunner
    update = runner_class._update_states
    kept = weakref.WeakKeyDictionary["AccountingRunner", SteadyStates]()

    @functools.wraps(update)
    def _update_states(self: AccountingRunner, scheduler_output: AccountedStep) -> object:
        states = kept.get(self)
        if states is None:
            states = kept[self] = SteadyStates()
        if states.goes_on(self, scheduler_output):
            return states.advance(self, scheduler_output)
        states.forget()
        return update(self, scheduler_output)

    transaction.set(runner_class, "_update_states", _update_states)


IMPLEMENTATIONS = {"steady-states": Implementation(_apply, optimistic_runner.unneeded)}
