"""A device that is the host, as vLLM's CPU platform has it: there is nothing to wait for, and values are compared."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from vllm_async_spec.compat.device import SimulatedDevice

__all__ = ["HostDevice"]


class HostDevice(SimulatedDevice):
    """As `SimulatedDevice`, but that all memory is the host's, and reading it is no wait."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def asked_by_name(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is: there is no device to wait for."""
        return contextlib.nullcontext()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Always: kernels read any tensor where it is."""
        return True

    def on_device(self, device: Any) -> bool:
        """Never: the CPU with a number is the host too."""
        return False
