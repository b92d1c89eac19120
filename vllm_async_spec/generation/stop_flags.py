"""Stop flags for transformers' `_sample` that do not make the host wait.

Each step uses the flags in three lines, the same in 4.57 and 5.19:

    unfinished = unfinished & ~stopping_criteria(input_ids, scores)
    stop if unfinished.max() == 0
    tokens = tokens * unfinished + pad * (1 - unfinished)          in the next step, after the forward

Only the second line makes the host wait. Here the host answers it from what it knows. The first line needs no
computation, because a row that has stopped stays stopped. The device computes everything else on request; if a side
stream computes the flags, the requesting stream waits for it first. If a later transformers uses another operation, the
device computes it too: perhaps synchronously, but correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from vllm_async_spec.generation.flag_channel import FlagChannel


class StopFlags(torch.Tensor):
    """Flags of one step: stopped rows, bool (batch,); or, inverted, the other rows, int64 (batch,)."""

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
        """Answer the operations that are named above; compute the others, after the side stream."""
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
    """What the host knows of one step."""

    finished: torch.Tensor
    """bool (batch,): rows that have stopped at this step or before."""
    channel: FlagChannel
    beside: bool
    """Whether a side stream computes `finished`."""
    length: int
    """Length of the sequences at this step."""
    all_before: bool
    """Whether no row had stopped before this step, neither by a criterion nor by a rule of the loop."""
    stopped: bool
    """Whether the host knows of a step at which every row had stopped."""
    unfinished: torch.Tensor | None = None
    """int64 (batch,): the other rows, computed on the first request."""

    def verdict(self) -> StopFlags:
        """What a list of stopping criteria returns: `finished`."""
        return self._flags(are_unfinished=False)

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], flags: StopFlags) -> Any:
        """The result of `func` if it is known without computing, else None; `flags` is the last of `args`."""
        if not flags._are_unfinished:
            return self._flags(are_unfinished=True) if func in _INVERT else None
        if func in _AND:
            return flags if self._holds_all_of(args[0]) else None
        if func is torch.Tensor.max and len(args) == 1:
            return _NONE_LEFT if self.stopped else _SOME_LEFT
        return None

    def rows(self, *, are_unfinished: bool) -> torch.Tensor:
        """`finished` or its inverse, as a plain tensor; the current stream waits for the side stream first."""
        if self.beside:
            self.channel.join()
            self.beside = False
        if not are_unfinished:
            return self.finished
        if self.unfinished is None:
            self.unfinished = self.finished ^ 1  # int64, in one launch
        return self.unfinished

    def _holds_all_of(self, before: Any) -> bool:
        """Whether `before & unfinished` equals `unfinished`: a stopped row stays stopped."""
        if isinstance(before, StopFlags):
            step = before._step
            return before._are_unfinished and step.channel is self.channel and step.length <= self.length
        return self.all_before

    def _flags(self, *, are_unfinished: bool) -> StopFlags:
        flags = self.finished.as_subclass(StopFlags)
        flags._step, flags._are_unfinished = self, are_unfinished
        return flags


def _computed(argument: Any) -> Any:
    """The argument with each `StopFlags` replaced by its plain tensor, also inside a tuple or list."""
    if isinstance(argument, StopFlags):
        return _rows(argument)
    return tree_map_only(StopFlags, _rows, argument) if isinstance(argument, tuple | list) else argument


def _rows(flags: StopFlags) -> torch.Tensor:
    return flags._step.rows(are_unfinished=flags._are_unfinished)


_NONE_LEFT, _SOME_LEFT = torch.tensor(0, device="cpu"), torch.tensor(1, device="cpu")
_INVERT = (torch.Tensor.__invert__, torch.bitwise_not, torch.Tensor.bitwise_not)
_AND = (torch.Tensor.__and__, torch.bitwise_and, torch.Tensor.bitwise_and)
