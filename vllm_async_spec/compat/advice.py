"""What to write instead of what a fault complains of.

Faults are sentences, also in published results, so the advice is found by the sentence. Waits have the remedies of the
audit.
"""

from __future__ import annotations

import re

from vllm_async_spec.audit.remedies import remedy
from vllm_async_spec.audit.report import WaitKind

WRONG = "use the bound for sizes only, and let kernels mask by device seq_lens"
AGAINST = "take the field from the common metadata, or give a field of another meaning another name"
UPDATED = (
    "write what depends on lengths into the tensors that the metadata has, or let "
    "supports_draft_decode_metadata_update be False"
)
IN_PLACE = "write to a copy, or to a buffer of the builder's own"
IN_TURN = "keep nothing of a batch in the builder, but buffers that each build fills anew"
WITHOUT_TRITON = "for a Triton kernel give --vllm-source, with the directory that contains the installed vllm/"
"""Without a GPU, vLLM puts a plain function where a Triton kernel was."""
_WAIT = re.compile(r" it waits: (?P<kind>[a-z ]+) \((?P<what>.+?)\) at ")


def instead(fault: str) -> str | None:
    """What to do instead of a fault of `Build` or `Attended`, in the imperative; None if there is no advice."""
    if (wait := _WAIT.search(fault)) is not None:
        return remedy(WaitKind(wait["kind"]), wait["what"])
    if "TypeError: 'function' object is not subscriptable" in fault:
        return WITHOUT_TRITON
    if fault.startswith("after other batches"):
        return IN_TURN
    if " it fails: " in fault and "'NoneType'" in fault:  # it takes lengths for granted that the host does not have
        return remedy(WaitKind.READ)
    if fault.startswith("after its update") and fault.endswith(" (wrong)"):
        return UPDATED
    if fault.endswith(" (wrong) against the batch in plain Python"):
        return AGAINST
    if fault.endswith(" (wrong)"):
        return WRONG
    return IN_PLACE if fault.endswith(" of the common metadata in place") else None


def advised(fault: str) -> str:
    """The fault, with its advice if there is any."""
    advice = instead(fault)
    return fault if advice is None else f"{fault}; instead: {advice}"
