"""What `_sample` of transformers gets for its stop flags, so that it does not wait for them.

Each step it does four things with them, the same in 4.57 and 5.19:

    unfinished = unfinished & ~stopping_criteria(input_ids, scores)
    stop if unfinished.max() == 0
    tokens = tokens * unfinished + pad * (1 - unfinished)          in the next step, after the forward

The second is the only one that makes the host wait. Here it is answered by what the host knows, and the first by what
a flag means. Everything else is computed on the device when it is asked for; if the flags are computed on the side
stream, the stream that asks waits for that first. An operation that is not in this list, in a transformers to come, is
computed like any other: synchronous perhaps, and right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

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
        flags = args[-1] if args else None
        if isinstance(flags, StopFlags) and not kwargs:
            answer = flags._step.answer(func, args, flags)
            if answer is not None:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            named = {name: _computed(each) for name, each in kwargs.items()} if kwargs else {}
            return func(*map(_computed, args), **named)


@dataclass(slots=True)
class StepFlags:
    """What is known of one step."""

    finished: torch.Tensor
    """bool (batch,): rows that have stopped at this step or before."""
    channel: FlagChannel
    beside: bool
    """Whether `finished` is computed beside the current stream."""
    length: int
    """Of the sequences at this step."""
    is_first: bool
    stopped: bool
    """Whether the host knows of a step at which no row was left."""
    unfinished: torch.Tensor | None = None
    """int64 (batch,): the other rows, once anybody has asked for them."""

    def verdict(self) -> StopFlags:
        """What a list of stopping criteria returns: `finished`."""
        return self._flags(are_unfinished=False)

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], flags: StopFlags) -> Any:
        """The result of `func`, where it is known without computing it, else None; `flags` are the last of `args`."""
        if not flags._are_unfinished:
            return self._flags(are_unfinished=True) if func in _INVERT else None
        if func in _AND:
            return flags if self._holds_all_of(args[0]) else None
        if func is torch.Tensor.max and len(args) == 1:
            return _NONE_LEFT if self.stopped else _SOME_LEFT
        return None

    def rows(self, *, are_unfinished: bool) -> torch.Tensor:
        """The flags themselves: `finished`, or the others; on the current stream, which waits for the side stream."""
        if self.beside:
            self.channel.join()
            self.beside = False
        if not are_unfinished:
            return self.finished
        if self.unfinished is None:
            self.unfinished = self.finished ^ 1  # int64, in one launch
        return self.unfinished

    def _holds_all_of(self, before: Any) -> bool:
        """Whether `before & unfinished` is `unfinished`: a row that has stopped stays so, and at first none has."""
        if isinstance(before, StopFlags):
            step = before._step
            return before._are_unfinished and step.channel is self.channel and step.length <= self.length
        return self.is_first

    def _flags(self, *, are_unfinished: bool) -> StopFlags:
        flags = self.finished.as_subclass(StopFlags)
        flags._step, flags._are_unfinished = self, are_unfinished
        return flags


def _computed(argument: Any) -> Any:
    """What is asked for instead of flags; they may be inside of an argument."""
    if isinstance(argument, StopFlags):
        return _rows(argument)
    return tree_map_only(StopFlags, _rows, argument) if isinstance(argument, tuple | list) else argument


def _rows(flags: StopFlags) -> torch.Tensor:
    return flags._step.rows(are_unfinished=flags._are_unfinished)


_NONE_LEFT, _SOME_LEFT = torch.tensor(0, device="cpu"), torch.tensor(1, device="cpu")
_INVERT = (torch.Tensor.__invert__, torch.bitwise_not, torch.Tensor.bitwise_not)
_AND = (torch.Tensor.__and__, torch.bitwise_and, torch.Tensor.bitwise_and)
