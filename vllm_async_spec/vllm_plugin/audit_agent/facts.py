"""Facts about an engine that its worker knows."""

from __future__ import annotations

import contextlib
import platform
from typing import TYPE_CHECKING

import torch

from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.settings import Mode
from vllm_async_spec.vllm_plugin.state import active_plugin

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import AttentionGroup, ModelRunner
    from vllm_async_spec.vllm_plugin.upstream_config import SpeculativeConfig


def worker_facts(runner: ModelRunner) -> dict[str, object]:
    """The fields of `audit.report.EngineFacts` that a worker can fill in, given its model runner."""
    import vllm

    config = runner.vllm_config
    groups = [group for row in runner.attn_groups for group in row]
    builders = [type(builder).__name__ for group in groups for builder in _builders(group)]
    cuda = torch.cuda.is_available()
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "driver": f"driver {_driver()}, CUDA {torch.version.cuda}" if cuda else "",
        "python": platform.python_version(),
        "model": config.model_config.model,
        "runner": "V2" if type(runner).__module__.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.")) else "V1",
        "backends": list(dict.fromkeys(group.backend.get_name() for group in groups)),
        "builders": list(dict.fromkeys(builders)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "speculation": _speculation(config.speculative_config),
        "graphs": getattr(config.compilation_config.cudagraph_mode, "name", "none").lower() if cuda else "none",
        "plugin": _plugin(),
        "world_size": config.parallel_config.world_size,
    }


def _builders(group: AttentionGroup) -> list[object]:
    """The metadata builders of an attention group, one per micro-batch."""
    return list(getattr(group, "metadata_builders", None) or [])


def _speculation(config: SpeculativeConfig | None) -> str:
    return "none" if config is None else f"{config.method}, K = {config.num_speculative_tokens}"


def _driver() -> str:
    with contextlib.suppress(Exception):  # a missing driver version must not end an audit
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return "unknown"


def _plugin() -> str:
    plugin = active_plugin()
    if plugin is None or plugin.settings.mode is Mode.OFF or plugin.ledger is None:
        return "off"
    outcomes = [outcome for outcome in plugin.ledger.outcomes.values() if not outcome.spec.name.startswith("audit-")]
    states = [outcome.state.value for outcome in outcomes]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    refused = "; ".join(f"{o.spec.name}: {o.detail}" for o in outcomes if o.state is State.REFUSED)
    return f"on: patches {counts}" + (f"; refused {refused}" if refused else "")
