"""CUDA graphs without CUDA: a step whose operations are recorded once, and then repeated on the same tensors.

As in a CUDA graph, addresses, sizes and values of the host are frozen, a read of the device is refused, and nothing
is kept alive but what the recording made: what nobody else has kept is missed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef


class CaptureError(RuntimeError):
    """The device was read on the host."""


class FreedError(AssertionError):
    """On a device the memory would hold something else by now, and nobody would say so."""


class RecordedSteps:
    pool: Any = None

    def __init__(
        self,
        slots: Any,
        step: Callable[[int], torch.Tensor | None],
        rewind: Callable[[], None],
    ):
        self.replays = 0
        self._recordings = []
        for slot in (0, 1):
            rewind()
            with Recording() as recording:
                kept = step(slot)
            self._recordings.append((recording, kept))

    def replay(self, slot: int) -> torch.Tensor | None:
        self.replays += 1
        recording, kept = self._recordings[slot]
        recording.replay()
        return kept


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self._made: dict[int, torch.Tensor] = {}
        """What was made inside, by id: a graph's pool."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        # Rows chosen by place are as many as there are places; rows chosen by flags are counted on the host.
        by_place = func is torch.ops.aten.index.Tensor and all(
            each is None or each.dtype != torch.bool for each in args[1]
        )
        if dynamic and not by_place:
            raise CaptureError(f"{func} reads the device on the host")
        result = func(*args, **kwargs)
        inputs = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        # Views, and what was written in place, are where they were; all else is written again by hand.
        fresh = [each if _address(each) not in inputs else None for each in _tensors(result)]
        if func is torch.ops.aten.lift_fresh.default:
            # `torch.tensor(...)` says only here that it has made one.
            self._made[id(args[0])] = args[0]
        held_args, held_kwargs = tree_map(self._hold, (args, kwargs))
        given = [each for each in tree_leaves((held_args, held_kwargs)) if isinstance(each, TensorWeakRef)]
        self._made.update({id(each): each for each in _tensors(result) if all(each is not one() for one in given)})
        self._calls.append((func, held_args, held_kwargs, fresh))
        return result

    def replay(self) -> None:
        for func, held_args, held_kwargs, fresh in self._calls:
            args, kwargs = tree_map(lambda each, func=func: _found(each, func), (held_args, held_kwargs))
            for kept, again in zip(fresh, _tensors(func(*args, **kwargs)), strict=True):
                if kept is not None:
                    kept.copy_(again)

    def _hold(self, each: Any) -> Any:
        is_given = isinstance(each, torch.Tensor) and id(each) not in self._made
        return TensorWeakRef(each) if is_given else each


def _found(each: Any, func: Any) -> Any:
    if not isinstance(each, TensorWeakRef):
        return each
    tensor = each()
    if tensor is None:
        raise FreedError(f"{func} reads a tensor that was freed since it was recorded; somebody has to keep it")
    return tensor


def _tensors(result: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
