"""`CudaDevice` without CUDA: what the suite does on a GPU, and on none."""

import pytest
import torch

from vllm_async_spec.compat.device import CudaDevice


class PassesForCuda(CudaDevice):
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Have PyTorch's functions that `CudaDevice` needs do nothing."""
    for name in ("synchronize", "set_sync_debug_mode", "get_sync_debug_mode"):
        patch.setattr(torch.cuda, name, lambda *_: None)
