"""Count host reads of device results on the engine's thread.

Two probes share an interface. `CudaProbe` sees the real waits for a CUDA device. `CpuProbe` runs on a CPU, where host
and device share memory: it follows the model's results through every operator and counts the reads that would wait on
a GPU. Both separate reads of the newest step (*now*: the host stops until the device has finished) from reads of the
step before (*late*: the device has work queued meanwhile).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SWEEP = 1024
"""Entries of `CpuProbe` after which those of freed storages are dropped; later, twice as many as were alive."""


@dataclass(slots=True)
class HostReads:
    """What a probe counted: steps, and reads by what was called."""

    steps: int = 0
    now: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, *, late: bool) -> None:
        """Count one read."""
        (self.late if late else self.now)[what] += 1

    def per_step(self) -> tuple[float, float]:
        """Reads a step, now and late."""
        steps = max(self.steps, 1)
        return self.now.total() / steps, self.late.total() / steps


class CpuProbe:
    """Follows the model's results through every operator of this thread; see the module.

    Overhead is several times the operators' own time, so nothing is timed while it is active.
    """

    def __init__(self) -> None:
        self.reads = HostReads()
        self._step = 0
        # From a storage's address to the step that wrote it. A weak reference keeps the address unique and frees the
        # data, so that a loop for each token does not keep every tensor of the loop.
        self._written: dict[int, tuple[int, StorageWeakRef]] = {}
        self._sweep_at = _SWEEP
        self._modes = self.modes()

    def modes(self) -> tuple[Any, ...]:
        """The modes to enter on a thread for the probe to see what that thread does."""
        return _Follow(self), _Watch(self)

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the target's forward: a new step, whose results are the device's."""
        self.reads.steps += 1
        self._step += 1
        # Iterate over a copy, and pop with a default: other threads may change the dict meanwhile.
        for key, (step, _) in list(self._written.items()):
            if step < self._step - 1:
                self._written.pop(key, None)
        results = run()
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self.mark(leaf, self._step)
        return results

    def mark(self, tensor: torch.Tensor, step: int) -> None:
        """Note that `tensor` holds what the device computed in `step`."""
        storage = tensor.untyped_storage()
        known = self._written.get(storage._cdata)
        if known is not None and known[0] == step:
            return
        self._written[storage._cdata] = (step, StorageWeakRef(storage))
        if len(self._written) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Drop the entries of storages that nothing holds any more."""
        # Iterate over a copy, and pop with a default: other threads may change the dict meanwhile.
        for key, (_, storage) in list(self._written.items()):
            if storage.expired():
                self._written.pop(key, None)
        self._sweep_at = max(_SWEEP, 2 * len(self._written))

    def step_of(self, values: Any) -> int | None:
        """The newest step that any tensor among `values` depends on; None if on none."""
        steps = [
            written[0]
            for leaf in tree_leaves(values)
            # One lookup, because another thread may remove the entry.
            if isinstance(leaf, torch.Tensor) and (written := self._written.get(leaf.untyped_storage()._cdata))
        ]
        return max(steps, default=None)

    def read(self, what: str, step: int) -> None:
        """Count a read of a value that depends on `step`."""
        self.reads.add(what, late=step < self._step)

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` that is the host's own."""
        copy = tensor.clone()
        self._written.pop(copy.untyped_storage()._cdata, None)
        return copy

    def copying(self, host: torch.Tensor) -> None:
        """Called for each non-blocking copy into `host`; subclasses may note the copy."""

    def __enter__(self) -> HostReads:
        for mode in self._modes:
            mode.__enter__()
        return self.reads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, traceback)


class _Follow(TorchDispatchMode):
    """Counts reads by operators, and marks what an operator writes with the newest step among its inputs."""

    def __init__(self, probe: CpuProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        step = self._probe.step_of((args, kwargs))
        if step is not None and (what := _read_by(self._probe, func, args, kwargs)) is not None:
            self._probe.read(what, step)
        out = func(*args, **kwargs)
        if step is not None:
            written = [
                args[i] if i < len(args) else kwargs.get(argument.name)
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for leaf in tree_leaves((out, written)):
                if isinstance(leaf, torch.Tensor):
                    self._probe.mark(leaf, step)
        return out


_ATEN = torch.ops.aten
# `item` is one operator in inference mode, and its parts elsewhere. The others return a Python value, or a shape, that
# depends on the tensor's content.
_OPERATORS = {
    _ATEN.item.default: "item",
    _ATEN._local_scalar_dense.default: "item",
    _ATEN.is_nonzero.default: "item",
    _ATEN.equal.default: "item",
    _ATEN.allclose.default: "item",
    _ATEN.nonzero.default: "nonzero",
    _ATEN.masked_select.default: "boolean index",
    _ATEN._unique2.default: "nonzero",
    _ATEN.unique_dim.default: "nonzero",
    _ATEN.unique_consecutive.default: "nonzero",
    _ATEN.bincount.default: "bincount",
    # One operator in inference mode, like `item`.
    _ATEN.nonzero_numpy.default: "nonzero",
    _ATEN.argwhere.default: "nonzero",
    _ATEN.where.default: "nonzero",
}
_WRITES_BY_INDEX = {_ATEN.index_put_.default, _ATEN.index_put.default}
# The repeats decide the result's length, unless the caller gives it.
_REPEATS = {_ATEN.repeat_interleave.Tensor, _ATEN.repeat_interleave.self_Tensor}


def _read_by(probe: CpuProbe, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """How this operator would read a device's tensor on the host; None if it would not."""
    if func is _ATEN.index.Tensor and _has_mask(probe, args[1]):
        return "boolean index"
    if func in _WRITES_BY_INDEX and _has_mask(probe, args[1]):
        # A single value is filled in under the mask, without counting the mask.
        return "boolean index" if args[2].numel() != 1 else None
    if func in _REPEATS and kwargs.get("output_size") is None:
        return "repeat_interleave"
    return _OPERATORS.get(func)


def _has_mask(probe: CpuProbe, indices: Sequence[torch.Tensor | None]) -> bool:
    """Whether an index is a device mask; a host mask is counted on the host, without a wait."""
    return any(i is not None and i.dtype is torch.bool and probe.step_of(i) is not None for i in indices)


class _Watch(TorchFunctionMode):
    """Finds reads that run no operator on a CPU, because the tensor is already on the host."""

    def __init__(self, probe: CpuProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A formatted scalar is read by `item`.
        what = None if func is torch.Tensor.__format__ and args[0].dim() == 0 else _READS.get(func)
        if what is None or (what == "to" and not _is_blocking_copy_to_host(args, kwargs)):
            out = func(*args, **kwargs)
            if kwargs.get("non_blocking") and func in (torch.Tensor.to, torch.Tensor.copy_):
                # On a GPU `to` returns a new tensor.
                out = out.clone() if out is args[0] and func is torch.Tensor.to else out
                self._probe.copying(out)
            return out
        step = self._probe.step_of(args[0])
        if step is None:
            return func(*args, **kwargs)
        self._probe.read(what, step)
        out = func(*args, **kwargs)
        # On a GPU this is a new host tensor, so later reads do not wait.
        return self._probe.fetched(out) if isinstance(out, torch.Tensor) else out


_READS = {
    torch.Tensor.cpu: "cpu",
    torch.Tensor.to: "to",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__repr__: "repr",
    torch.Tensor.__format__: "repr",
}


def _is_blocking_copy_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device", next((a for a in args[1:] if isinstance(a, (str, torch.device))), None))
    return device is not None and torch.device(device).type == "cpu" and not kwargs.get("non_blocking", False)


class CudaProbe:
    """Counts this thread's waits for a CUDA device: calls that wait, and what PyTorch's sync debug mode warns of.

    An event wait is late if the event was recorded before the newest step was launched. Any other wait is for all
    queued work, so for the newest step. The interpreter's profiling hook sees the calls, because PyTorch's event type
    is immutable. The hook slows Python down several times, so nothing is timed while the probe is active.
    """

    def __init__(self) -> None:
        self.reads = HostReads()
        self._thread = threading.get_ident()
        self._step = 0
        self._recorded: dict[int, int] = {}
        self._restore: list[Callable[[], None]] = []

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the target's forward; the new step begins once it is launched."""
        results = run()
        self.reads.steps += 1
        self._step += 1
        return results

    def __enter__(self) -> HostReads:
        catcher = warnings.catch_warnings()
        catcher.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._on_warning
        mode, profile = torch.cuda.get_sync_debug_mode(), sys.getprofile()
        torch.cuda.set_sync_debug_mode("warn")
        self._restore = [
            lambda: catcher.__exit__(None, None, None),
            lambda: torch.cuda.set_sync_debug_mode(mode),
            lambda: sys.setprofile(profile),
        ]
        sys.setprofile(self._on_call)
        return self.reads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._restore:
            self._restore.pop()()

    def _on_call(self, frame: FrameType, kind: str, called: Any) -> None:
        if kind != "c_call" or called.__name__ not in ("record", "synchronize", "_cuda_synchronize"):
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, torch.Event | torch.cuda.Event):
            if called.__name__ == "record":
                self._recorded[id(owner)] = self._step
            else:
                self.reads.add("event", late=self._recorded.get(id(owner), 0) < self._step)
        elif called.__name__ == "_cuda_synchronize" or isinstance(owner, torch.Stream):
            self.reads.add("synchronize", late=False)

    def _on_warning(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message) and threading.get_ident() == self._thread:
            self.reads.add("copy", late=False)
