"""A kernel that changes a tensor through its pointer; imported where Triton runs or is interpreted."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(values, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, tl.load(values + at, mask=at < count) + 1, mask=at < count)


def add_one(tensor: torch.Tensor) -> None:
    _add_one[(triton.cdiv(tensor.numel(), 64),)](tensor, tensor.numel(), BLOCK=64)
