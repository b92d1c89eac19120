"""Facts of a running engine for its result, and the choice of the plugins that vLLM loads into it."""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.caches import compiles_alone

_OURS = "async_spec"
_ALL_REDUCES = {
    "ca_comm": "custom",
    "fi_ar_comm": "FlashInfer",
    "qr_comm": "quick",
    "symm_mem_comm": "symmetric memory",
    "pynccl_comm": "NCCL",
}
"""Communicators of vLLM's device communicator, in the order in which vLLM asks them for an all-reduce."""


class EngineError(RuntimeError):
    """The engine is not what the arm declares; the message says what to do."""


def choose_plugins(plugin: str) -> None:
    """Choose the plugins that vLLM loads, and check that ours is installed if the arm needs it.

    Raises:
        EngineError: the plugin is not installed here.
    """
    names = vllm_plugins()
    if plugin == "stock":
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names - {_OURS}))
    elif _OURS not in names:
        raise EngineError(f"vllm-async-spec is not installed for {sys.executable}; run `pip install --no-deps .`")


def load_plugins(arm: Mapping[str, Any]) -> None:
    """Let vLLM load the plugins of a stock engine with one rank, and forget which `choose_plugins` chose.

    Else stock would compile anew (see `compiles_alone`), and perhaps choose other kernels than all other arms.
    """
    if arm["plugin"] == "stock" and not compiles_alone(arm):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        del os.environ["VLLM_PLUGINS"]


def vllm_plugins() -> set[str]:
    """Names of all plugins of vLLM that are installed."""
    entries = (entry for package in distributions() for entry in package.entry_points)
    return {entry.name for entry in entries if entry.group.startswith("vllm.")}


def plugin_state() -> str:
    """State of our plugin in this process: not loaded, off, or on."""
    module = sys.modules.get("vllm_async_spec.vllm_plugin.state")
    plugin = module.active_plugin() if module else None
    if plugin is None:
        return "not loaded"
    return "off" if plugin.settings.mode.value == "off" else "on"


def engine_facts(runner: Any, config: Any) -> dict[str, Any]:
    """Facts of the engine whose worker is in this process: what vLLM resolved its configuration to."""
    import torch
    import vllm

    compilation, scheduler = config.compilation_config, config.scheduler_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plugin": plugin_state(),
        "runner": "V2" if type(runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
        "backends": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
        "async_scheduling": bool(scheduler.async_scheduling),
        "graphs": _name(compilation.cudagraph_mode),
        "compilation": {
            "mode": _name(compilation.mode),
            "backend": str(compilation.backend),
            "largest_graph": max(compilation.cudagraph_capture_sizes or [0]),
        },
        "all_reduce": all_reduce(config.parallel_config.tensor_parallel_size),
        "data_parallel": data_parallel(config.parallel_config),
        "scheduler": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        },
        "hardware": hardware(),
    }


def in_words(facts: dict[str, Any]) -> str:
    """What vLLM resolved the configuration of an engine to, of the facts of `engine_facts`, for a table's caption."""
    compilation = facts["compilation"]
    compiled = f"compilation {compilation['mode']}" + (f" ({compilation['backend']})" if compilation["backend"] else "")
    return (
        f"vLLM {facts['vllm']}, runner {facts['runner']}, {', '.join(facts['backends'])}, {compiled}, "
        f"graphs {facts['graphs']}, all-reduce {facts['all_reduce']}, {facts.get('data_parallel', '')}"
        f"{'asynchronous' if facts['async_scheduling'] else 'synchronous'} scheduling"
    )


def captions(facts: Mapping[str, dict[str, Any]]) -> list[str]:
    """The engines of arms in words, one line for those that are the same; none for facts of older results."""
    arms: dict[str, list[str]] = {}
    for arm, found in facts.items():
        if "compilation" in found:
            arms.setdefault(in_words(found), []).append(arm)
    return [f"{', '.join(names)}: {words}." for words, names in arms.items()]


def all_reduce(ranks: int) -> str:
    """The all-reduces that vLLM has at hand for `ranks` tensor-parallel ranks, in the order in which it asks them."""
    if ranks == 1:
        return "none"
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    found = {attribute: getattr(communicator, attribute, None) for attribute in _ALL_REDUCES}
    able = [attribute for attribute, each in found.items() if each and not getattr(each, "disabled", False)]
    return ", ".join(_ALL_REDUCES[attribute] for attribute in able) or type(communicator).__name__


def data_parallel(parallel: Any) -> str:
    """Data parallelism, and how experts exchange tokens, with a comma after it; empty for one engine."""
    if parallel.data_parallel_size == 1:
        return ""
    experts = f" with experts by {parallel.all2all_backend}" if parallel.enable_expert_parallel else ""
    return f"data parallel {parallel.data_parallel_size}{experts}, "


def check_declared(arm: dict[str, Any], facts: dict[str, Any]) -> None:
    """Check that an engine is what its arm declares.

    Raises:
        EngineError: the runner or the plugin's state differs.
    """
    if arm["runner"] not in (None, facts["runner"]):
        raise EngineError(f"this arm needs runner {arm['runner']}, and runs on {facts['runner']}")
    wanted = {"stock": "not loaded", "noop": "off", "plugin": "on"}[arm["plugin"]]
    if facts["plugin"] != wanted:
        raise EngineError(f"the plugin must be {wanted!r} in this arm, and is {facts['plugin']!r}")


def check_release(arm: dict[str, Any]) -> None:
    """Check that this environment has the arm's release of vLLM.

    Raises:
        EngineError: vLLM is another release.
    """
    import vllm

    if arm["release"] not in (None, vllm.__version__.partition("+")[0]):
        raise EngineError(f"this arm needs vLLM {arm['release']}, and its environment has {vllm.__version__}")


def hardware() -> dict[str, Any]:
    """This machine: device, processor, memory in GiB, driver."""
    import torch

    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line),
        platform.processor() or platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found: dict[str, Any] = {"device": "CPU", "cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory)}
    if torch.cuda.is_available():
        driver = _read("/proc/driver/nvidia/version").partition("Module")[2].split()
        found |= {
            "device": torch.cuda.get_device_name(),
            "driver": next((word for word in driver if word[:1].isdigit()), "unknown"),
            "cuda": torch.version.cuda,
        }
    return found


def _name(value: Any) -> str:
    """The name of an enumeration's value; releases differ in whether a mode is one."""
    return str(getattr(value, "name", value if value is not None else "NONE"))


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""
