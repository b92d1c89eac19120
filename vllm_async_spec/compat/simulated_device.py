"""Devices that need no GPU: host memory treated as a device, and the host itself.

`SimulatedDevice` follows device memory through every operator, as `audit.host_reads.CpuProbe` does. A tensor is the
device's if it was made on `device`, computed from a device tensor, or copied there. So the simulated device sees copies
in both directions and explicit waits. It computes real values, so results can be compared. It can't see unpinned
memory, reads by kernels, waits of compiled code, or time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_async_spec.audit.host_reads import CpuProbe
from vllm_async_spec.audit.report import WaitKind
from vllm_async_spec.audit.stack import RawStack, take
from vllm_async_spec.compat.device import MAKE_UNINITIALISED, MAPPED, Wait, numpy_zeroed, readable_wait
from vllm_async_spec.compat.stream_stand_ins import stand_in_streams

_DEPTH = 64

_ONLY_READ = {"_copy_page_indices_kernel": ("block_table", "cu_num_blocks")}
"""Arguments that vLLM's kernels do not write, by kernel. Any other tensor argument counts as written."""

_IN_FLIGHT, _DEVICE_MEMORY, _NOT_VALIDATED = -1, 0, 1
"""Marks of tensors, in place of `CpuProbe`'s steps; a tensor computed from several kinds gets the greatest.

In flight is host memory into which a non-blocking copy was started; a read of it is a wait too.
"""


class SimulatedDevice(CpuProbe):
    """Host memory treated as a device; see the module.

    `each_wait` records a wait as often as it happens, and not once for the same lines.
    """

    validates_kernels = False

    def __init__(self, *, each_wait: bool = False) -> None:
        self._each_wait = each_wait
        # PyTorch makes tensors on it, and it is not equal to torch.device("cpu").
        self.device = torch.device("cpu", 0)
        self.found: list[Wait] = []
        self.given: Any = None  # the arguments of the call of PyTorch that runs
        self._known: set[tuple[WaitKind, str, RawStack]] = set()
        self._inputs: set[int] = set()
        self._calls: dict[str, Mapping[str, object]] = {}
        super().__init__()

    def modes(self) -> tuple[Any, ...]:
        """The probe's modes, then the modes that know which side a tensor is on."""
        return *super().modes(), _Copies(self), _Sides(self)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the tensor the device's and return it; kernels that did not run count as not writing it."""
        self.mark(tensor, _DEVICE_MEMORY)
        self._inputs.add(_key(tensor))
        return tensor

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Wait]]:
        """Collect the calls that would wait on a GPU."""
        found: list[Wait] = []
        self.found, self._known = found, set()
        # No gradients, as in vLLM's runner; PyTorch would keep extra copies for them.
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing has been compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self.asked_by_name())
            stack.enter_context(numpy_zeroed())
            for mode in self.modes():
                stack.enter_context(mode)
            yield found

    def asked_by_name(self) -> contextlib.AbstractContextManager[None]:
        """A context in which explicit waits for the device, a stream or an event are recorded."""
        return stand_in_streams(self.waited, self.device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is the device's."""
        return _key(tensor) in self._written

    def is_validated(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are independent of kernels that did not run."""
        return self.step_of(tensor) != _NOT_VALIDATED

    def kernel_did_not_run(
        self, name: str, arguments: Mapping[str, object], results: Sequence[torch.Tensor] = ()
    ) -> None:
        """Record the launch of a kernel that did not run; `results` stand in for the tensors that it would have made.

        All tensors of the arguments count as written, but placed and read-only ones.
        """
        with _disable_current_modes():
            copies = {key: self._copy(value) for key, value in arguments.items()}
        self._calls[f"kernel {len(self._calls)} {name}"] = copies
        only_read = _ONLY_READ.get(name, ())
        given = [each for key, each in arguments.items() if isinstance(each, torch.Tensor) and key not in only_read]
        for tensor in (*given, *results):
            if _key(tensor) not in self._inputs:
                self.mark(tensor, _NOT_VALIDATED)

    def kernel_calls(self) -> Mapping[str, Mapping[str, object]]:
        """The arguments of kernels that did not run, since `clear`, by number and name."""
        return dict(self._calls)

    def clear(self) -> None:
        """Forget all tensors and kernel calls."""
        self._written = {}
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forget kernel calls and what was placed, but not which tensors are the device's."""
        self._inputs.clear()
        self._calls.clear()

    def _copy(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.clone()
        if (step := self.step_of(value)) is not None:
            self.mark(copy, step)
        return copy

    def read(self, what: str, step: int) -> None:
        """Record a read of device memory, also as a wait."""
        super().read(what, step)
        self.waited(WaitKind.COPY_TO_HOST if what in ("cpu", "to") else WaitKind.READ, what)

    def waited(self, kind: WaitKind, what: str) -> None:
        """Record a wait with its call stack; the same wait from the same lines once, unless each is wanted.

        So a loop that waits for each token keeps one wait, and not one with a stack for each token.
        """
        stack = take(_DEPTH)
        if self._each_wait or (kind, what, stack) not in self._known:
            self._known.add((kind, what, stack))
            self.found.append(Wait(kind, what, readable_wait(stack)))

    def to_host(self, tensor: torch.Tensor) -> None:
        """Make the tensor's memory the host's from now on."""
        self._written.pop(_key(tensor), None)

    def copy_started(self, tensor: torch.Tensor) -> None:
        """Note a non-blocking copy into a host tensor."""
        if self.is_validated(tensor):
            self.mark(tensor, _IN_FLIGHT)

    def mixes(self, values: Any) -> bool:
        """Whether tensors of both sides are among an operator's `values`, which PyTorch refuses.

        Only what the caller gave counts, and not what PyTorch makes in between. A host scalar is allowed. Tensors of
        `vmap` hide their memory, and are not judged.
        """
        leaves = [each for each in tree_leaves(self.given) if isinstance(each, torch.Tensor)]
        given = {_key(each) for each in leaves if not torch._C._functorch.is_batchedtensor(each)}
        tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.ndim]
        return {None, _DEVICE_MEMORY} <= {self.step_of(each) for each in tensors if _key(each) in given}

    def on_device(self, device: Any) -> bool:
        """Whether an argument names this device rather than the host: `cuda`, or a CPU with an index."""
        named = torch.device(device)
        return named.type != "cpu" or named.index is not None


class HostDevice(SimulatedDevice):
    """A `SimulatedDevice` on which all memory is the host's, so that reads do not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def asked_by_name(self) -> contextlib.AbstractContextManager[None]:
        """Record nothing: there is no device to wait for."""
        return contextlib.nullcontext()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """True: kernels read any tensor in host memory."""
        return True

    def on_device(self, device: Any) -> bool:
        """False: a CPU with an index is the host too."""
        return False


def _key(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


class _Copies(TorchDispatchMode):
    """Finds copies between host and device among operators."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default:
            return self._copy(func, args, kwargs)
        if func is _ATEN.fill_.Tensor and self._device.holds(args[1]) and not self._device.holds(args[0]):
            return args[0].fill_(args[1].item())
        one_side = torch.Tag.pointwise in getattr(func, "tags", ()) or getattr(func, "overloadpacket", 0) in _ONE_SIDE
        if one_side and self._device.mixes((args, kwargs)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            )
        if func in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
            indices = [i for i in args[1] if i is not None and i.dtype is not torch.bool]
            if self._device.holds(args[0]) and any(not self._device.holds(i) for i in indices):
                self._device.waited(WaitKind.COPY_TO_DEVICE, "index on the host")
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[0], args[1]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        sides = self._device.holds(target), self._device.holds(source)
        if blocking and sides == (True, False):
            self._device.waited(WaitKind.COPY_TO_DEVICE, "copy_")
        if blocking and sides == (False, True):
            self._device.waited(WaitKind.COPY_TO_HOST, "copy_")
        out = func(*args, **kwargs)
        if sides == (False, True):
            (self._device.to_host if blocking else self._device.copy_started)(target)
        return out


_ATEN = torch.ops.aten
_ONE_SIDE = {_ATEN.cat, _ATEN.stack, _ATEN.index_select, _ATEN.gather, _ATEN.masked_fill, _ATEN.mm, _ATEN.floor_divide}
"""Operators beside the pointwise ones that take tensors of one side only; others may take an index of the other."""
_DEVICE_OF = torch.Tensor.device.__get__
# These copy the caller's data, which is the host's unless it is a device tensor.
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_UNINITIALISED = {getattr(owner, name) for owner, name in MAKE_UNINITIALISED}


class _Sides(TorchFunctionMode):
    """Notes the side on which a tensor is made or moved; operators don't show it, since both sides are one memory."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda tensor, *args, **kwargs: self._to(tensor, "cuda", **kwargs),
            torch.Tensor.type_as: self._to,
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.nn.functional.one_hot: self._one_hot,
            torch.Tensor.pin_memory: lambda tensor, *args: tensor,
            torch.Tensor.is_pinned: lambda tensor, *args: not self._device.holds(tensor),
            _DEVICE_OF: lambda tensor: self._device.device if self._device.holds(tensor) else torch.device("cpu"),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (special := self._special.get(func)) is not None:
            return special(*args, **kwargs)
        self._device.given = args, kwargs
        try:
            return self._call(func, args, kwargs)
        finally:
            self._device.given = None

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)  # a CPU build of PyTorch refuses it
        device = kwargs.get("device")
        if device is None and func in _FROM_DATA:
            device = self._device_of_data(func, args)
        if device is None:
            out = func(*args, **kwargs)
        else:
            out = self._make(func, args, kwargs, self._device.on_device(device))
        if func in _UNINITIALISED and out.nbytes <= MAPPED:
            out.zero_()  # so that two builds of one batch agree
        return out

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        out = func(*args, **kwargs | {"device": "cpu"})
        if not isinstance(out, torch.Tensor):
            return out
        if func in _FROM_DATA:
            given = args[1:] if func is torch.Tensor.new_tensor else args
            data = given[0] if given else kwargs.get("data", kwargs.get("obj"))
            return self._from_data(func.__name__, data, out, on_device)
        if on_device:
            self._device.mark(out, _DEVICE_MEMORY)
        else:
            self._device.to_host(out)
        return out

    def _device_of_data(self, func: Any, args: Any) -> Any:
        """Where a function of `_FROM_DATA` makes a tensor that is given no device; None if PyTorch knows."""
        if func is torch.Tensor.new_tensor:
            return self._device.device if self._device.holds(args[0]) else "cpu"
        # A list is read on the host.
        return "cpu" if args and not isinstance(args[0], torch.Tensor) else None

    def _from_data(self, name: str, data: Any, out: torch.Tensor, on_device: bool) -> torch.Tensor:
        held = self._device.step_of(data) is not None
        if held and not isinstance(data, torch.Tensor):  # each tensor of a list is read
            self._device.read("item", _DEVICE_MEMORY)
            held = False
        if held == on_device:
            return out
        self._device.waited(WaitKind.COPY_TO_DEVICE if on_device else WaitKind.COPY_TO_HOST, name)
        out = self._device.fetched(out)  # `as_tensor` returns the memory of its argument
        if on_device:
            self._device.mark(out, _DEVICE_MEMORY)
        return out

    def _deepcopy(self, tensor: Any, memo: dict[int, Any]) -> Any:
        """`Tensor.__deepcopy__`, which copies between storages, and those have no side."""
        if type(tensor) is not torch.Tensor or id(tensor) in memo or not self._device.holds(tensor):
            return torch.Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]
        memo[id(tensor)] = copy = tensor.clone()
        return copy

    def _one_hot(self, tensor: Any, num_classes: int = -1) -> Any:
        """`one_hot`, which only on a CPU reads the classes that it is given the number of."""
        if num_classes < 0 or not self._device.holds(tensor):
            return torch.nn.functional.one_hot(tensor, num_classes)
        return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to`, in any of its forms: `(device, dtype, non_blocking)`, `(dtype, non_blocking)`, `(other)`."""
        target = kwargs.pop("device", None)
        for arg in args:
            if isinstance(arg, bool):
                kwargs.setdefault("non_blocking", arg)
            elif isinstance(arg, torch.dtype):
                kwargs["dtype"] = arg
            elif isinstance(arg, torch.Tensor):
                target = self._device.device if self._device.holds(arg) else "cpu"
                kwargs["dtype"] = arg.dtype
            else:
                target = arg
        held = self._device.holds(tensor)
        if target is None or self._device.on_device(target) == held:
            return tensor.to(**kwargs) if kwargs else tensor
        if held:
            out = tensor.to("cpu", **kwargs)
            if kwargs.get("non_blocking"):
                self._device.copy_started(out)
            return out
        moved = tensor.to(**kwargs | {"copy": True})
        if not kwargs.get("non_blocking"):
            self._device.waited(WaitKind.COPY_TO_DEVICE, "to")
        self._device.mark(moved, _DEVICE_MEMORY)
        return moved
