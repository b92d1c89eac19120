"""Device kernels: each a Triton kernel and a PyTorch reference with the same signature."""

from vllm_async_spec.kernels.device_inputs import (
    ROW_FIELDS,
    LastStep,
    PagedGroup,
    StepInputs,
    correct_inputs,
    correct_inputs_reference,
)
from vllm_async_spec.kernels.paged_lengths import (
    compile_kernels,
    set_chunks,
    set_chunks_reference,
    set_last_page_lens,
    set_last_page_lens_reference,
    set_pages,
    set_pages_reference,
    set_work_lens,
    set_work_lens_reference,
)
from vllm_async_spec.kernels.steady_batch import (
    BatchInputs,
    advance_batch,
    advance_batch_reference,
    compile_advance_batch,
)
from vllm_async_spec.kernels.virtual_batches import (
    compile_virtual_batches,
    gather_pages,
    gather_pages_reference,
    split_by_chunks,
    split_by_chunks_reference,
    virtual_batches,
)

__all__ = [
    "ROW_FIELDS",
    "BatchInputs",
    "LastStep",
    "PagedGroup",
    "StepInputs",
    "advance_batch",
    "advance_batch_reference",
    "compile_advance_batch",
    "compile_kernels",
    "compile_virtual_batches",
    "correct_inputs",
    "correct_inputs_reference",
    "gather_pages",
    "gather_pages_reference",
    "set_chunks",
    "set_chunks_reference",
    "set_last_page_lens",
    "set_last_page_lens_reference",
    "set_pages",
    "set_pages_reference",
    "set_work_lens",
    "set_work_lens_reference",
    "split_by_chunks",
    "split_by_chunks_reference",
    "virtual_batches",
]
