"""What to write instead of code that makes the host wait: one table, for the audit and for the compatibility suite."""

from __future__ import annotations

from vllm_async_spec.audit.report import WaitKind

_FROM_LENGTHS = "build from device seq_lens or seq_lens_cpu_upper_bound"
_STAGED = "stage the data in pinned memory and copy without blocking"
_LATER = "have the device carry the value to the next step, or wait for it a step later"
_SAME_SHAPE = "keep the shape, and mask with torch.where or a length on the device"

BY_KIND: dict[WaitKind, str] = {
    WaitKind.READ: _FROM_LENGTHS,
    WaitKind.COPY_TO_HOST: _FROM_LENGTHS,
    WaitKind.COPY_TO_DEVICE: _STAGED,
    WaitKind.PAGEABLE: "copy from pinned memory",
    WaitKind.STREAM: _LATER,
    WaitKind.EVENT: _LATER,
    WaitKind.DEVICE: _LATER,
}
"""A clause in the imperative for each kind of wait."""

BY_CALL: dict[str, str] = {
    "repeat_interleave": "pass output_size, which the host knows from query_start_loc_cpu",
    "nonzero": _SAME_SHAPE,
    "boolean index": _SAME_SHAPE,
    "bincount": "count into a tensor of fixed size with scatter_add_",
    "index on the host": "stage the index in pinned memory and copy it without blocking before indexing",
    # PyTorch's sync debug mode does not tell reads from copies.
    "warning": f"{_FROM_LENGTHS}; for a copy to the device, {_STAGED}",
}
"""The same for calls that have a better remedy than others of their kind."""


def remedy(kind: WaitKind, what: str = "") -> str:
    """What to write instead of a wait in `what`, such as `nonzero`: a clause in the imperative, without a full stop."""
    return BY_CALL.get(what, BY_KIND[kind])
