"""A device tensor whose value, or an upper bound of it, the host knows: reading it does not wait for the device.

vLLM reads some device tensors on the host with `cpu()` or `item()` where no argument takes the host's value instead.
"""

from __future__ import annotations

from typing import Any

import torch


class KnownOnHost(torch.Tensor):
    """A device tensor whose `cpu()` and `item()` answer from the host. Results computed from it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    host: torch.Tensor

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The host's tensor itself, not a copy."""
        return self.host

    def item(self) -> Any:
        """The host's one value."""
        return self.host.item()


def known_on_host(tensor: torch.Tensor, host: torch.Tensor) -> KnownOnHost:
    """`tensor`, of any shape and dtype, on the same memory, with reads answered by `host`."""
    known: KnownOnHost = tensor.as_subclass(KnownOnHost)
    known.host = host
    return known
