"""The interface of a device to try builders on, the waits found on a device, and a GPU as a device.

`CudaDevice` sees the waits that PyTorch's sync debug mode warns of, with the line that caused each. It can't tell reads
from copies. `simulated_device` has the devices that need no GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from vllm_async_spec.audit.cuda_waits import AuditedEvent, CudaWaits
from vllm_async_spec.audit.report import Frame, WaitKind
from vllm_async_spec.audit.stack import RawStack, plain, readable
from vllm_async_spec.patching import temporarily

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SHOWN = 6
_LAZY = ("seq_lens_cpu", "num_computed_tokens_cpu")
_DECORATORS = ("typing_extensions.py", "warnings.py")  # files of decorators that vLLM puts on _LAZY


@dataclass(frozen=True, slots=True)
class Wait:
    """One moment at which the host waits for the device.

    Attributes:
        kind: How the host waits.
        what: The function called, such as `item`.
        stack: The calling frames, innermost first, without those of PyTorch and of this package.
    """

    kind: WaitKind
    what: str
    stack: tuple[Frame, ...]

    @property
    def site(self) -> str:
        """`file:line` of the line that waits and of its caller, without frames of the metadata's lazy properties."""
        asked = [frame for frame in self.stack if frame.function.rpartition(".")[2] not in _LAZY]
        return " < ".join(f"{frame.file}:{frame.line}" for frame in (asked or self.stack)[:2]) or "unknown"

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.what}) at {self.site}"


class Device(Protocol):
    """Where builders are made and run."""

    device: torch.device
    """The device argument of a builder."""
    validates_kernels: bool
    """Whether kernels run; if not, what they would compute is not validated."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy of it, in device memory."""

    def watching(self) -> contextlib.AbstractContextManager[list[Wait]]:
        """Collect the waits of this thread while the context is open."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in device memory."""

    def is_validated(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are independent of kernels that did not run."""

    def kernel_calls(self) -> Mapping[str, Mapping[str, object]]:
        """The arguments of kernels that did not run, since `clear`, by number and name."""

    def clear(self) -> None:
        """Forget all tensors and kernel calls."""

    def begin_batch(self) -> None:
        """Forget kernel calls and what was placed, but keep a builder's own tensors."""


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
        # The first use of a default device makes PyTorch keep the functions that take one; keep its own, not ours.
        with torch.device("cpu"):
            torch.empty(0)
        recorder = CudaWaits()
        recorder.start()
        try:
            with temporarily() as changes, numpy_zeroed(), torch.no_grad():  # as in vLLM's runner
                # torch.Event is written in C, so its waits can't be observed.
                changes.set(torch, "Event", AuditedEvent)
                for owner, name in MAKE_UNINITIALISED:
                    changes.set(owner, name, _zeroed(getattr(owner, name)))
                yield found
        finally:
            recorder.stop()
            kinds = {"warning": WaitKind.STREAM, "event": WaitKind.EVENT, "device": WaitKind.DEVICE}
            # The recorder also notes copies: a blocking one warns too, and a non-blocking one does not wait.
            # Each kind of wait of the same lines once; a loop may have thousands.
            calls = dict.fromkeys((c.what, c.stack) for c in recorder.calls if c.what in kinds)
            found += [Wait(kinds[what], what, readable_wait(stack)) for what, stack in calls]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a GPU."""
        return tensor.is_cuda

    def is_validated(self, tensor: torch.Tensor) -> bool:
        """True: kernels run."""
        return True

    def kernel_calls(self) -> Mapping[str, Mapping[str, object]]:
        """None: kernels run."""
        return {}

    def clear(self) -> None:
        """Do nothing: PyTorch knows where each tensor is."""

    def begin_batch(self) -> None:
        """Do nothing, as for `clear`."""


def is_lost(device: Device) -> bool:
    """Whether the device is a GPU on which a kernel failed, so that every CUDA call of this process now fails."""
    if device.device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


MAKE_UNINITIALISED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)
"""Functions that return uninitialised memory; both devices zero it, so that two builds of one batch agree."""

MAPPED = 32 << 20
"""Largest size to zero, in bytes. On a CPU, larger blocks are newly mapped and already zero; writing them is slow."""


def _zeroed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `function` to return zeros, so that two builds of one batch agree."""

    def zeroed(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = function(*args, **kwargs)
        if out.is_meta or type(out) is not torch.Tensor or torch.compiler.is_compiling():
            return out  # a compiler's tensor has no memory, and perhaps no size
        return out.zero_() if out.nbytes <= MAPPED else out

    return zeroed


@contextlib.contextmanager
def numpy_zeroed() -> Iterator[None]:
    """NumPy's uninitialised memory is zero while this is open, for the same reason."""

    def zeroed(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if out.nbytes <= MAPPED and not out.dtype.hasobject:
                out.fill(0)
            return out

        return made

    with temporarily() as changes:
        for name in ("empty", "empty_like"):
            changes.set(np, name, zeroed(getattr(np, name)))
        yield


def readable_wait(stack: RawStack) -> tuple[Frame, ...]:
    """The frames between the suite's call of the builder and PyTorch."""
    frames = plain(stack)
    called = next((at for at, entry in enumerate(frames) if entry[0] in _CALLERS), len(frames))
    theirs = [frame for frame in frames[:called] if not frame[0].startswith(_OURS)]
    return readable(tuple(frame for frame in theirs if not frame[0].endswith(_DECORATORS)), _SHOWN)


_CALLERS = (_OURS + "check.py", _OURS + "forward.py")
"""Files that call builders and layers; frames outside them belong to the suite's caller."""
