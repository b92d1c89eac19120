"""Lets engines of data parallelism draft without asking each other, where the drafter has no experts.

Engines that divide experts run each forward of the target at once, so they agree on its size. The V1 runner has them
agree on the sizes of drafting too: once for the first pass and once for the draft steps. Each time the host waits for a
message from every other engine. A drafter without experts exchanges nothing with them, so each engine runs it at its
own size, as with one engine. vLLM itself leaves engines alone whose target has no experts.

If one engine left out the message and another waited for it, both would hang. So the first agreement of a drafter, on a
GPU in vLLM's memory profiling, carries a vote: each engine that could do without sends `_VOTE` as a number of tokens
that stock vLLM sends too, and does not read. Only if all engines vote so is it the last.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.patching import Transaction, temporarily
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import Proposer

_NAME = "_determine_batch_execution_and_padding"
_VOTE = -1
_Size = tuple[Any, int, "torch.Tensor | None"]
"""Kind of graph, padded tokens, and tokens of each engine as int32 on the host."""

_alone: weakref.WeakKeyDictionary[Proposer, bool] = weakref.WeakKeyDictionary()
"""The result of the vote, by drafter."""


def asks_engines(drafter: Proposer) -> bool:
    """Whether, with several engines, forwards of this drafter wait for the others; true until they have voted."""
    return not _alone.get(drafter, False)


def could_be_alone(drafter: Proposer) -> bool:
    """Whether this drafter, whose model is loaded, has no experts by vLLM's configuration and by its modules' names.

    Experts of the target that it shares count too. An engine that joins later could not take part in the vote.
    """
    config = drafter.vllm_config
    named = any("moe" in type(module).__name__.lower() for module in drafter.model.modules())
    experts = named or config.speculative_config.draft_model_config.is_moe
    return not experts and not config.parallel_config.enable_elastic_ep


def _apply(transaction: Transaction, module: ModuleType) -> None:
    from vllm.config import CUDAGraphMode

    proposer = module.SpecDecodeBaseProposer
    determine = getattr(proposer, _NAME)

    def vote(drafter: Proposer, *given: Any) -> _Size:
        from vllm.v1.worker import dp_utils

        meet, votes = dp_utils._run_ar, list[int]()
        mine = {"orig_num_tokens_per_ubatch": _VOTE} if could_be_alone(drafter) else {}

        def voting(**given: Any) -> torch.Tensor:
            made: torch.Tensor = meet(**given | mine)
            votes.extend(made[0].tolist())  # (4, engines) int32, the first row unpadded tokens
            return made

        with temporarily() as changes:
            changes.set(dp_utils, "_run_ar", voting)
            size: _Size = determine(drafter, *given)
        _alone[drafter] = bool(votes) and all(each == _VOTE for each in votes)
        if _alone[drafter]:
            inform("vllm-async-spec: the %d engines draft without asking each other, by their vote", len(votes))
        return size

    @functools.wraps(determine)
    def _determine_batch_execution_and_padding(self: Proposer, num_tokens: int, use_cudagraphs: bool = True) -> _Size:
        engines = self.vllm_config.parallel_config.data_parallel_size
        if engines > 1 and self not in _alone:
            return vote(self, num_tokens, use_cudagraphs)
        if engines == 1 or asks_engines(self):
            size: _Size = determine(self, num_tokens, use_cudagraphs)
            return size
        modes = None if use_cudagraphs else {CUDAGraphMode.NONE}
        mode, batch = self.cudagraph_dispatcher.dispatch(num_tokens, valid_modes=modes)
        # Without counts of all engines vLLM's forward context would ask for them.
        return mode, batch.num_tokens, torch.full((engines,), batch.num_tokens, dtype=torch.int32, device="cpu")

    transaction.set(proposer, _NAME, _determine_batch_execution_and_padding)


IMPLEMENTATIONS = {"drafter-agreement": Implementation(_apply)}
