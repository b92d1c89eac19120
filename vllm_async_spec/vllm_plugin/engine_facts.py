"""What a worker's model runner is: its kind and its attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import ModelRunner


def runner_kind(runner: ModelRunner) -> str:
    """`V1` or `V2`."""
    return "V2" if type(runner).__module__.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.")) else "V1"


def backend_names(runner: ModelRunner) -> list[str]:
    """The attention backends of the model's layers, each once; none before the KV cache exists."""
    groups = [group for row in getattr(runner, "attn_groups", []) for group in row]
    return list(dict.fromkeys(group.backend.get_name() for group in groups))
