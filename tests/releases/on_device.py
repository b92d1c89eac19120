"""Which tensors of a runner's metadata are on a GPU in an engine, told to the simulated device."""

from typing import Any

from vllm_async_spec.audit.host_reads import CpuProbe


def on_device(given: Any, *more: str) -> CpuProbe:
    """Follows everything of `given` that is on a GPU in an engine; `more` names other fields that are."""
    probe = CpuProbe()
    for name in ("seq_lens", "query_start_loc", "block_table_tensor", "slot_mapping", *more):
        probe.mark(getattr(given, name), 0)
    return probe
