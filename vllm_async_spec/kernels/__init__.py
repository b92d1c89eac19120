"""The few device kernels: each a Triton kernel and a PyTorch reference of one signature."""

from vllm_async_spec.kernels.paged_lengths import (
    compile_kernels,
    set_chunks,
    set_chunks_reference,
    set_last_page_lens,
    set_last_page_lens_reference,
    set_work_lens,
    set_work_lens_reference,
)

__all__ = [
    "compile_kernels",
    "set_chunks",
    "set_chunks_reference",
    "set_last_page_lens",
    "set_last_page_lens_reference",
    "set_work_lens",
    "set_work_lens_reference",
]
