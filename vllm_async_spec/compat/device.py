"""The device that builders are tried on: a GPU, or host memory that passes for one.

`SimulatedDevice` follows device memory through every operator, as `audit.host_reads.CpuProbe` does, and knows which
side a tensor is on: what is made on `device`, what is computed from it, and what is copied there is the device's. So it
sees copies in both directions. It computes real values, and therefore results can be compared. What it can't see:
memory that is not pinned, what a kernel reads, waits of compiled code, and the time of anything.

`CudaDevice` sees what PyTorch's sync debug mode warns of, with the line that caused it. It can't tell reads from
copies.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vllm_async_spec.audit.cuda_waits import AuditedEvent, CudaWaits
from vllm_async_spec.audit.host_reads import CpuProbe
from vllm_async_spec.audit.report import Frame, WaitKind
from vllm_async_spec.audit.stack import RawStack, plain, readable, take
from vllm_async_spec.compat import explicit_waits
from vllm_async_spec.patching import temporarily

__all__ = ["CudaDevice", "Device", "SimulatedDevice", "Wait", "is_lost"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEPTH = 64
_SHOWN = 6
_LAZY = ("seq_lens_cpu", "num_computed_tokens_cpu")
_DECORATORS = ("typing_extensions.py", "warnings.py")  # such as @deprecated, which vLLM puts on them


@dataclass(frozen=True, slots=True)
class Wait:
    """One moment at which the host waits for the device.

    Attributes:
        kind: Which way.
        what: What was called, such as `item`.
        stack: Who asked, innermost first, without PyTorch's frames and this package's.
    """

    kind: WaitKind
    what: str
    stack: tuple[Frame, ...]

    @property
    def site(self) -> str:
        """`file:line` of who asked, and of who called that; a lazy property of the metadata asks for somebody else."""
        asked = [frame for frame in self.stack if frame.function.rpartition(".")[2] not in _LAZY]
        return " < ".join(f"{frame.file}:{frame.line}" for frame in (asked or self.stack)[:2]) or "unknown"

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.what}) at {self.site}"


class Device(Protocol):
    """Where builders are made and run."""

    device: torch.device
    """What a builder is given."""
    validates_kernels: bool
    """Whether kernels run; otherwise what they would have computed is not validated."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy of it, in device memory."""

    def watching(self) -> contextlib.AbstractContextManager[list[Wait]]:
        """Collect the waits of this thread, within."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is in device memory."""

    def is_validated(self, tensor: torch.Tensor) -> bool:
        """Whether no kernel that did not run had a hand in its values."""

    def kernel_calls(self) -> Mapping[str, Mapping[str, object]]:
        """The arguments of kernels that did not run, since `clear`, by number and name."""

    def clear(self) -> None:
        """Forget all memory, and all kernels."""


class CudaDevice:
    """A CUDA device."""

    validates_kernels = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU."""
        return tensor.to(self.device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Wait]]:
        """Collect what PyTorch's sync debug mode warns of, and waits for events and for the device."""
        found: list[Wait] = []
        torch.cuda.synchronize()
        recorder = CudaWaits()
        recorder.start()
        try:
            with temporarily() as changes, torch.no_grad():  # as vLLM's runner has it
                # Waits for events of its own class, which is written in C, could not be heard.
                changes.set(torch, "Event", AuditedEvent)
                for owner, name in _MAKE_UNINITIALISED:
                    changes.set(owner, name, _zeroed(getattr(owner, name)))
                yield found
        finally:
            recorder.stop()
            kinds = {"warning": WaitKind.STREAM, "event": WaitKind.EVENT, "device": WaitKind.DEVICE}
            # A copy that was asked for without blocking is noted too, and waits for nothing.
            found += [Wait(kinds[c.what], c.what, _readable(c.stack)) for c in recorder.calls if c.what in kinds]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a GPU."""
        return tensor.is_cuda

    def is_validated(self, tensor: torch.Tensor) -> bool:
        """True: kernels run."""
        return True

    def kernel_calls(self) -> Mapping[str, Mapping[str, object]]:
        """None: kernels run."""
        return {}

    def clear(self) -> None:
        """Nothing: PyTorch knows what is whose."""


def is_lost(device: Device) -> bool:
    """Whether it is a GPU on which a kernel went astray, after which CUDA refuses whatever this process asks for."""
    if device.device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


_MAKE_UNINITIALISED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)
_MAPPED = 32 << 20
"""More is mapped afresh by the allocator, and so is zero on a CPU; writing it would cost more than all else."""


def _zeroed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As `function`, but two builds of the same don't differ by what lay in memory before them."""

    def zeroed(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = function(*args, **kwargs)
        if out.is_meta or type(out) is not torch.Tensor or torch.compiler.is_compiling():
            return out  # a compiler's: it has no memory, and perhaps no size
        return out.zero_() if out.nbytes <= _MAPPED else out

    return zeroed


_ONLY_READ = {"_copy_page_indices_kernel": ("block_table", "cu_num_blocks")}
"""Arguments that kernels of vLLM's do not write, by kernel. Any other argument passes for written."""

_DEVICE_MEMORY, _NOT_VALIDATED = 0, 1
"""What `CpuProbe` calls steps: the later of two wins in whatever is computed from both."""


class SimulatedDevice(CpuProbe):
    """Host memory that passes for a device's; see the module."""

    validates_kernels = False

    def __init__(self) -> None:
        # Unlike torch.device("cpu"), and PyTorch makes tensors on it.
        self.device = torch.device("cpu", 0)
        self.found: list[Wait] = []
        self._inputs: set[int] = set()
        self._calls: dict[str, Mapping[str, object]] = {}
        super().__init__()

    def modes(self) -> tuple[Any, ...]:
        """The probe's, and on top of them those that know which side a tensor is on."""
        return *super().modes(), _Copies(self), _Sides(self)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, which is the device's from now on; a kernel that did not run has not changed it."""
        self.mark(tensor, _DEVICE_MEMORY)
        self._inputs.add(_key(tensor))
        return tensor

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Wait]]:
        """Collect the waits that these calls would be on a GPU."""
        found: list[Wait] = []
        self.found = found
        # As vLLM's runner has it; and with gradients PyTorch would keep copies that nobody asked for.
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing has been compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self.asked_by_name())
            for mode in self.modes():
                stack.enter_context(mode)
            yield found

    def asked_by_name(self) -> contextlib.AbstractContextManager[None]:
        """Within it, waits for the device, a stream or an event are told."""
        return explicit_waits.told(self.waited)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is the device's."""
        return _key(tensor) in self._written

    def is_validated(self, tensor: torch.Tensor) -> bool:
        """Whether no kernel that did not run had a hand in its values."""
        return self.step_of(tensor) != _NOT_VALIDATED

    def kernel_did_not_run(
        self, name: str, arguments: Mapping[str, object], results: Sequence[torch.Tensor] = ()
    ) -> None:
        """Told of a kernel that was to be launched.

        Args:
            name: The kernel.
            arguments: What it was given, by name. It may have written any tensor of them but the placed ones.
            results: What stands for tensors that it would have made.
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
        """Forget all memory, and all kernels."""
        self._written = {}
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
        """Keep a read of device memory."""
        super().read(what, step)
        self.waited(WaitKind.COPY_TO_HOST if what in ("cpu", "to") else WaitKind.READ, what)

    def waited(self, kind: WaitKind, what: str) -> None:
        """Keep a wait, with who asked for it."""
        self.found.append(Wait(kind, what, _readable(take(_DEPTH))))

    def to_host(self, tensor: torch.Tensor) -> None:
        """What is in its memory is the host's from now on."""
        self._written.pop(_key(tensor), None)

    def on_device(self, device: Any) -> bool:
        """Whether an argument names this device rather than the host; `cuda` does, and the CPU with a number."""
        named = torch.device(device)
        return named.type != "cpu" or named.index is not None


def _key(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _readable(stack: RawStack) -> tuple[Frame, ...]:
    """The frames between the suite's call of the builder and PyTorch."""
    frames = plain(stack)
    called = next((at for at, entry in enumerate(frames) if entry[0] in _CALLERS), len(frames))
    theirs = [frame for frame in frames[:called] if not frame[0].startswith(_OURS)]
    return readable(tuple(frame for frame in theirs if not frame[0].endswith(_DECORATORS)), _SHOWN)


_CALLERS = (_OURS + "check.py", _OURS + "forward.py")
"""What calls builders and layers; frames below are whoever called the suite."""


class _Copies(TorchDispatchMode):
    """Copies between the sides that arrive as operators."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default:
            return self._copy(func, args, kwargs)
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
        if blocking and sides == (False, True):
            self._device.to_host(target)
        return out


_ATEN = torch.ops.aten
_DEVICE_OF = torch.Tensor.device.__get__
# These take the caller's data, from the host unless it is a device tensor.
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_UNINITIALISED = {getattr(owner, name) for owner, name in _MAKE_UNINITIALISED}


class _Sides(TorchFunctionMode):
    """Which side a tensor is made on or moved to, which no operator tells because here both are one memory."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda tensor, *args, **kwargs: self._to(tensor, "cuda", **kwargs),
            torch.Tensor.pin_memory: lambda tensor, *args: tensor,
            torch.Tensor.is_pinned: lambda tensor, *args: not self._device.holds(tensor),
            _DEVICE_OF: lambda tensor: self._device.device if self._device.holds(tensor) else torch.device("cpu"),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (special := self._special.get(func)) is not None:
            return special(*args, **kwargs)
        kwargs.pop("pin_memory", None)  # a CPU build of PyTorch refuses it
        device = kwargs.get("device")
        if device is None:
            out = func(*args, **kwargs)
        else:
            out = self._make(func, args, kwargs, self._device.on_device(device))
        if func in _UNINITIALISED and out.nbytes <= _MAPPED:
            out.zero_()  # or two builds of the same would differ
        return out

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        out = func(*args, **kwargs | {"device": "cpu"})
        if not isinstance(out, torch.Tensor):
            return out
        if not on_device:
            self._device.to_host(out)
            return out
        if func in _FROM_DATA:
            data = args[0] if func is not torch.Tensor.new_tensor else args[1]
            if isinstance(data, torch.Tensor) and self._device.holds(data):
                return out
            self._device.waited(WaitKind.COPY_TO_DEVICE, func.__name__)
            out = out.clone()
        self._device.mark(out, _DEVICE_MEMORY)
        return out

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
            return tensor.to("cpu", **kwargs)
        moved = tensor.to(**kwargs | {"copy": True})
        if not kwargs.get("non_blocking"):
            self._device.waited(WaitKind.COPY_TO_DEVICE, "to")
        self._device.mark(moved, _DEVICE_MEMORY)
        return moved
