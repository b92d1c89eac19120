"""What `_sample` of transformers gets for its stop flags, so that it does not wait for them.

Each step it does four things with them, the same in 4.57 and 5.19:

    unfinished = unfinished & ~stopping_criteria(input_ids, scores)
    stop if unfinished.max() == 0
    tokens = tokens * unfinished + pad * (1 - unfinished)          in the next step, after the forward

The second is the only one that makes the host wait. Here it is answered by what the host knows. Everything else is
computed on the device, and the stream that computes it waits for the side stream first. An operation that is not in
this list, in a transformers to come, is computed like any other: synchronous perhaps, and right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.flag_channel import FlagChannel


class StopFlags(torch.Tensor):
    """Flags of one step: rows that have stopped, bool (batch,), or, inverted, the others, int64 (batch,)."""

    _step: StepFlags
    _are_unfinished: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer the operations that are named above; compute the others, behind the side stream."""
        flags = next(arg for arg in reversed(args) if isinstance(arg, StopFlags))
        return flags._step.answer(func, args, kwargs or {})


@dataclass(slots=True)
class StepFlags:
    """What is known of one step."""

    finished: torch.Tensor
    """bool (batch,): rows that have stopped at this step or before; computed beside the current stream."""
    unfinished: torch.Tensor
    """int64 (batch,): the others."""
    channel: FlagChannel
    is_first: bool
    stopped: bool
    """Whether the host knows of a step at which no row was left."""
    joined: bool = False

    def verdict(self) -> StopFlags:
        """What a list of stopping criteria returns: `finished`."""
        return self._flags(self.finished, are_unfinished=False)

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func`, from what is known where that is possible."""
        flags = args[0]
        if func in _INVERT and not flags._are_unfinished:
            return self._flags(self.unfinished, are_unfinished=True)
        if func in _AND and self._holds_all_of(*args):
            return args[1]
        if func is torch.Tensor.max and len(args) == 1 and not kwargs and flags._are_unfinished:
            return _NONE_LEFT if self.stopped else _SOME_LEFT
        if not self.joined:
            self.channel.join()
            self.joined = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _holds_all_of(self, before: Any, now: Any) -> bool:
        """Whether `before & now` is `now`: a row that has stopped stays so, and at first none has."""
        if not isinstance(now, StopFlags) or not now._are_unfinished:
            return False
        if isinstance(before, StopFlags):
            return before._are_unfinished and before._step.channel is self.channel
        return self.is_first

    def _flags(self, rows: torch.Tensor, *, are_unfinished: bool) -> StopFlags:
        flags = rows.as_subclass(StopFlags)
        flags._step, flags._are_unfinished = self, are_unfinished
        return flags


_NONE_LEFT, _SOME_LEFT = torch.tensor(0, device="cpu"), torch.tensor(1, device="cpu")
_INVERT = (torch.Tensor.__invert__, torch.bitwise_not, torch.Tensor.bitwise_not)
_AND = (torch.Tensor.__and__, torch.bitwise_and, torch.Tensor.bitwise_and)
