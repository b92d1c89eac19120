"""The few device kernels: each a Triton kernel and a PyTorch reference of one signature."""

from vllm_async_spec.kernels.paged_lengths import (
    set_last_page_lens,
    set_last_page_lens_reference,
    set_work_lens,
    set_work_lens_reference,
)
from vllm_async_spec.kernels.virtual_batches import (
    gather_pages,
    gather_pages_reference,
    split_by_chunks,
    split_by_chunks_reference,
    virtual_batches,
)

__all__ = [
    "gather_pages",
    "gather_pages_reference",
    "set_last_page_lens",
    "set_last_page_lens_reference",
    "set_work_lens",
    "set_work_lens_reference",
    "split_by_chunks",
    "split_by_chunks_reference",
    "virtual_batches",
]
