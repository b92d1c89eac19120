"""The device that builders are tried on, the waits that are found there, and a GPU as such a device.

`CudaDevice` sees what PyTorch's sync debug mode warns of, with the line that caused it. It can't tell reads from
copies. `simulated_device` has the devices that need no GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_async_spec.audit.cuda_waits import AuditedEvent, CudaWaits
from vllm_async_spec.audit.report import Frame, WaitKind
from vllm_async_spec.audit.stack import RawStack, plain, readable
from vllm_async_spec.patching import temporarily

__all__ = ["MAKE_UNINITIALISED", "MAPPED", "CudaDevice", "Device", "Wait", "is_lost", "readable_wait"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
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
                for owner, name in MAKE_UNINITIALISED:
                    changes.set(owner, name, _zeroed(getattr(owner, name)))
                yield found
        finally:
            recorder.stop()
            kinds = {"warning": WaitKind.STREAM, "event": WaitKind.EVENT, "device": WaitKind.DEVICE}
            # A copy that was asked for without blocking is noted too, and waits for nothing.
            found += [Wait(kinds[c.what], c.what, readable_wait(c.stack)) for c in recorder.calls if c.what in kinds]

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


MAKE_UNINITIALISED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)
"""Functions that return memory as it was found; both devices zero it, or two builds of one batch would differ."""

MAPPED = 32 << 20
"""Bytes. More is mapped afresh by the allocator, and so is zero on a CPU; writing it would cost more than all else."""


def _zeroed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As `function`, but two builds of the same don't differ by what lay in memory before them."""

    def zeroed(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = function(*args, **kwargs)
        if out.is_meta or type(out) is not torch.Tensor or torch.compiler.is_compiling():
            return out  # a compiler's: it has no memory, and perhaps no size
        return out.zero_() if out.nbytes <= MAPPED else out

    return zeroed


def readable_wait(stack: RawStack) -> tuple[Frame, ...]:
    """The frames between the suite's call of the builder and PyTorch."""
    frames = plain(stack)
    called = next((at for at, entry in enumerate(frames) if entry[0] in _CALLERS), len(frames))
    theirs = [frame for frame in frames[:called] if not frame[0].startswith(_OURS)]
    return readable(tuple(frame for frame in theirs if not frame[0].endswith(_DECORATORS)), _SHOWN)


_CALLERS = (_OURS + "check.py", _OURS + "forward.py")
"""What calls builders and layers; frames below are whoever called the suite."""
