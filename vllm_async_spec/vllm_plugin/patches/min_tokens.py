"""Makes min_tokens ignore drafts in flight. vLLM's V1 runner counts these drafts, and allows stop tokens too early.

Under asynchronous scheduling a request's output ends in placeholders, one for each token that the last step may have
given. For penalties and bad words vLLM replaces placeholders by real tokens just before sampling. The patch requests
the same for min_tokens. So only a batch with a request below its minimum waits. Each wait is counted, as a host wait
and as a fallback to exact counts. Requests whose tokens nobody reads keep their placeholders.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import ReadKind, host_read, record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_batch import (
        AddRequest,
        CopyEvent,
        MinTokensProcessor,
        SampledBatch,
    )
    from vllm_async_spec.vllm_plugin.upstream_config import VllmConfig

_PLACEHOLDER = -1


class Confirmed(Sequence[int]):
    """A view of a request's output tokens that does not count the placeholders at their end."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        count = len(self._tokens)
        while count and self._tokens[count - 1] == _PLACEHOLDER:
            count -= 1
        return count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._tokens[: len(self)][index]


class CountedEvent:
    """The event of a copy that the host waits for only because of min_tokens."""

    __slots__ = ("_event", "_nbytes")

    def __init__(self, event: CopyEvent, nbytes: int) -> None:
        self._event = event
        self._nbytes = nbytes

    def synchronize(self) -> None:
        """Wait, and count the wait."""
        record_fallback("min_tokens")
        with host_read("sampled_token_ids", self._nbytes, ReadKind.EVENT):
            self._event.synchronize()


def _apply(transaction: Transaction, module: ModuleType) -> None:
    """Replace placeholders before sampling while min_tokens counts, then let its processors count again."""
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    batch_class = module.InputBatch
    update, keep = batch_class.update_async_output_token_ids, batch_class.set_async_sampled_token_ids
    make = MinTokensLogitsProcessor.__init__

    @functools.wraps(make)
    def __init__(self: MinTokensProcessor, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        make(self, vllm_config, *args, **kwargs)
        if vllm_config.speculative_config is not None:  # without drafts each placeholder stands for one token
            self.add_request = _counting_confirmed(type(self).add_request)

    @functools.wraps(update)
    def update_async_output_token_ids(self: SampledBatch) -> None:
        counting, needed = _counting(self), bool(self.sampling_metadata.output_token_ids)
        if not counting and not (needed and _has_drafts(self)):
            update(self)
            return
        event, rows = self.async_copy_ready_event, self.prev_req_id_to_index
        if event is not None and not _read_by_vllm(self):
            self.async_copy_ready_event = CountedEvent(event, self.sampled_token_ids_cpu.nbytes)
        if rows is not None:
            self.prev_req_id_to_index = _read_rows(self, rows)
        try:
            with _output_given(self):
                update(self)
        finally:
            self.async_copy_ready_event, self.prev_req_id_to_index = event, rows
        for processor in counting:
            processor.update_state(None)

    @functools.wraps(keep)
    def set_async_sampled_token_ids(self: SampledBatch, *sampled: Any, **named: Any) -> None:
        with _output_given(self) if _counting(self) else contextlib.nullcontext():
            keep(self, *sampled, **named)

    transaction.set(MinTokensLogitsProcessor, "__init__", __init__)
    transaction.set(batch_class, "update_async_output_token_ids", update_async_output_token_ids)
    transaction.set(batch_class, "set_async_sampled_token_ids", set_async_sampled_token_ids)


@contextlib.contextmanager
def _output_given(batch: SampledBatch) -> Iterator[None]:
    """Within the block, vLLM takes the batch for one whose sampling reads output tokens.

    Outside, vLLM would also copy each step's drafts to the host and wait for them, which min_tokens does not need.
    """
    metadata = batch.sampling_metadata
    given = metadata.output_token_ids
    metadata.output_token_ids = given or batch.req_output_token_ids
    try:
        yield
    finally:
        metadata.output_token_ids = given


def _counting_confirmed(add_request: AddRequest) -> AddRequest:
    def add_confirmed(params: object, prompt_token_ids: list[int] | None, output_token_ids: Sequence[int]) -> object:
        return add_request(params, prompt_token_ids, Confirmed(output_token_ids))

    return add_confirmed


def _read_rows(batch: SampledBatch, rows: Mapping[str, int]) -> Mapping[str, int]:
    """The requests whose output tokens somebody reads, of those that were in the last step: their rows in it.

    vLLM replaces all placeholders of a request by the tokens of its last step. Where nobody has read the request's
    tokens so far, the placeholders are those of many steps. Its count of tokens would then stay ahead, and end the
    engine at the model's length.
    """
    thinking = _thinking(batch)
    if batch.logitsprocs_need_output_token_ids or thinking is None:
        return rows
    penalised = batch.frequency_penalties_reqs | batch.presence_penalties_reqs | batch.repetition_penalties_reqs
    read = {row for processor in _counting(batch) for row in processor.min_toks}
    read |= batch.bad_words_token_ids.keys() | thinking
    now = batch.req_id_to_index
    return {name: row for name, row in rows.items() if name in penalised or now.get(name) in read}


def _thinking(batch: SampledBatch) -> Set[int] | None:
    """The rows of requests with a thinking budget, from 0.21 on; None if there are some, but it is unknown which."""
    holder = getattr(batch, "thinking_budget_state_holder", None)
    if holder is None or not holder.has_tracked_requests():
        return frozenset()
    rows: Mapping[int, object] | None = getattr(holder, "_state", None)
    return None if rows is None else rows.keys()


def _read_by_vllm(batch: SampledBatch) -> bool:
    """Whether stock vLLM too reads output tokens of this batch, and so waits for them."""
    read = not batch.no_penalties or batch.bad_words_token_ids or batch.logitsprocs_need_output_token_ids
    return bool(read or _thinking(batch) is None or _thinking(batch))


def _has_drafts(batch: SampledBatch) -> bool:
    """Whether the engine decodes speculatively."""
    return any(map(_confirms, batch.logitsprocs.all))


def _counting(batch: SampledBatch) -> list[MinTokensProcessor]:
    """The batch's min_tokens processors that still count for a request, if drafts make the count uncertain."""
    return [p for p in batch.logitsprocs.all if getattr(p, "min_toks", None) and _confirms(p)]


def _confirms(processor: object) -> bool:
    """Whether this is a min_tokens processor of an engine with drafts."""
    return "add_request" in getattr(processor, "__dict__", ())


IMPLEMENTATIONS = {"min-tokens": Implementation(_apply)}
