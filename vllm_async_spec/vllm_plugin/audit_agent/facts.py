"""Facts about an engine that its worker knows."""

from __future__ import annotations

import contextlib
import platform
from typing import TYPE_CHECKING

import torch

from vllm_async_spec.vllm_plugin.engine_facts import backend_names, runner_kind
from vllm_async_spec.vllm_plugin.ledger import count_states, summary
from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher
from vllm_async_spec.vllm_plugin.scheduling import is_on, noted
from vllm_async_spec.vllm_plugin.settings import Mode
from vllm_async_spec.vllm_plugin.state import active_plugin

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import ModelRunner
    from vllm_async_spec.vllm_plugin.upstream_config import SpeculativeConfig, VllmConfig


def worker_facts(runner: ModelRunner) -> dict[str, object]:
    """The fields of `audit.report.EngineFacts` that a worker can fill in, given its model runner."""
    import vllm

    config = runner.vllm_config
    groups = [group for row in runner.attn_groups for group in row]
    builders = [builder for group in groups for builder in getattr(group, "metadata_builders", None) or []]
    cuda = torch.cuda.is_available()
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "driver": f"driver {_driver()}, CUDA {torch.version.cuda}" if cuda else "",
        "python": platform.python_version(),
        "model": config.model_config.model,
        "runner": runner_kind(runner),
        "backends": backend_names(runner),
        "builders": list(dict.fromkeys(type(builder).__name__ for builder in builders)),
        "async_scheduling": is_on(config),
        **_decided_by(config),
        "speculation": _speculation(config.speculative_config),
        "graphs": getattr(config.compilation_config.cudagraph_mode, "name", "none").lower() if cuda else "none",
        "plugin": _plugin(),
        "world_size": config.parallel_config.world_size,
    }


def _decided_by(config: VllmConfig) -> dict[str, object]:
    """Who decided about asynchronous scheduling; nothing where the plugin did not see the configuration made."""
    decision = noted(config)
    return {} if decision is None else {"decided_by": f"decided by {decision.by}"}


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
    snapshot = publisher.snapshot()
    refused = "; ".join(f"{name}: {why}" for name, why in sorted(snapshot.refused.items()))
    return f"on: patches {summary(count_states(snapshot.patches))}" + (f"; refused {refused}" if refused else "")
