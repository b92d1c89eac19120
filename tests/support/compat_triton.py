"""A backend for vLLM whose builder launches a Triton kernel, and so does its forward."""

from typing import Any

import torch
from compat_attention import Builder, Impl, Right
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backend import AttentionMetadataBuilder


@triton.jit
def fill_ones(out, count: tl.constexpr):
    tl.store(out + tl.arange(0, count), 1)


class Launching(Builder, AttentionMetadataBuilder[Any]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self.ones = torch.zeros(16, dtype=torch.int32, device=device)

    def secret(self, metadata: Any) -> Any:
        fill_ones[(1,)](self.ones, 16)
        return self.ones


class LaunchingImpl(Impl):
    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, built: Any, output: Any) -> Any:
        fill_ones[(1,)](output, 16)
        return output


class Backend(Right):
    builder = Launching
    impl = LaunchingImpl
