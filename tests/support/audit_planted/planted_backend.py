"""vLLM's own backend with a builder that waits in each way of PLANTED_WAITS, which an audit must find."""

import os
from typing import Any

import torch
from planted import ON_GPU

if ON_GPU:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Base
else:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Base


def read(lengths: torch.Tensor) -> int:
    return int(lengths.max().item())  # planted: read


def copy_to_host(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.cpu()  # planted: copy to host


def wait_for_event(lengths: torch.Tensor) -> torch.Tensor:
    host = lengths.to("cpu", non_blocking=True)
    event = torch.Event()
    event.record()
    event.synchronize()  # planted: event
    return host.max()


def copy_pageable(lengths: torch.Tensor) -> torch.Tensor:
    host = torch.empty(lengths.shape, dtype=lengths.dtype)
    return host.copy_(lengths, non_blocking=True)  # planted: pageable copy


WAITS = {"read": read, "copy to host": copy_to_host, "event": wait_for_event, "pageable copy": copy_pageable}
WANTED = [WAITS[name] for name in os.environ["PLANTED_WAITS"].split(",")]


class Builder(Base.get_builder_cls()):  # type: ignore[misc]
    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        for wait in WANTED:
            wait(common_attn_metadata.seq_lens)
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)


class Backend(Base):
    @staticmethod
    def get_builder_cls() -> type:
        return Builder
