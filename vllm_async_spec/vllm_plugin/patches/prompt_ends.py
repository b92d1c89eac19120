"""Keeps a hybrid's step that has the end of a prompt in it from the CUDA graphs of decoding, in vLLM's V1 runner.

The runner takes a step for decoding by its shape alone: each request has one token more than there are drafts. The last
chunk of a prompt may be as long. The builder of linear attention does not write such a batch into the tensors that the
graphs of decoding read, so the graphs replay an older step: they write its states, and none of the prompt's. Attention
has no such tensors. The patch tells the runner that the batch does not decode, unless all its requests have drafts.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import SchedulerOutput
    from vllm_async_spec.vllm_plugin.upstream_batch import DispatchingRunner


def _mends(runner: DispatchingRunner) -> bool:
    # With pipeline and sequence parallelism the worker asks before the step, and needs the answer that the runner gets.
    asked_before = runner.parallel_config.pipeline_parallel_size > 1 and runner.compilation_config.pass_config.enable_sp
    return runner.model_config.is_hybrid and not asked_before


def _apply(transaction: Transaction, module: ModuleType) -> None:
    runner_class = module.GPUModelRunner
    update, determine = runner_class._update_states, runner_class._determine_batch_execution_and_padding
    drafting = weakref.WeakKeyDictionary["DispatchingRunner", int]()

    @functools.wraps(update)
    def _update_states(self: DispatchingRunner, scheduler_output: SchedulerOutput) -> object:
        drafting[self] = len(scheduler_output.scheduled_spec_decode_tokens)
        return update(self, scheduler_output)

    @functools.wraps(determine)
    def _determine_batch_execution_and_padding(
        self: DispatchingRunner, *, num_reqs: int, force_uniform_decode: bool | None = None, **more: Any
    ) -> object:
        # vLLM forces an answer in dummy runs. Without drafts a step of one token each decodes, whatever it is of.
        if force_uniform_decode is None and self.num_spec_tokens and drafting.get(self, num_reqs) < num_reqs:
            force_uniform_decode = False if _mends(self) else None
        return determine(self, num_reqs=num_reqs, force_uniform_decode=force_uniform_decode, **more)

    transaction.set(runner_class, "_update_states", _update_states)
    transaction.set(runner_class, "_determine_batch_execution_and_padding", _determine_batch_execution_and_padding)


IMPLEMENTATIONS = {"prompt-ends": Implementation(_apply)}
