"""Compares what the ranks of an engine decided, once their KV cache exists and before anything is compiled or captured.

Each rank decides for itself whether FlashInfer has XQA kernels, which batches CUDA graphs hold and which patches fit.
While graphs are captured all ranks meet in collectives, so ranks that decide differently wait for each other for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from vllm_async_spec import __version__
from vllm_async_spec.patching import Transaction, temporarily
from vllm_async_spec.vllm_plugin.ledger import Implementation, State
from vllm_async_spec.vllm_plugin.log import inform, logger
from vllm_async_spec.vllm_plugin.state import active_plugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_async_spec.vllm_plugin.upstream import WorkerWrapper
    from vllm_async_spec.vllm_plugin.upstream_config import ParallelConfig

    class Executor(Protocol):
        """Makes the workers of all ranks, and calls them."""

        parallel_config: ParallelConfig

        def collective_rpc(self, method: str | Callable[..., object], *args: object, **kwargs: object) -> Any:
            """Call a method or function in each worker; what each returned, by rank."""


ABSENT, FAILED = "absent", "failed"
_REMEDY = (
    "give all ranks the same packages and variables, or set VLLM_ASYNC_SPEC=off; the start ends here, because it could "
    "hang"
)


class RanksDifferError(RuntimeError):
    """Ranks of one engine decided differently."""


def decisions(wrapper: WorkerWrapper) -> dict[str, str]:
    """What this rank decided, by subject; or under `FAILED`, why it can't say. Never raises.

    Runs in the worker, after its metadata builders are made. vLLM's executor would leave the other ranks' answers in
    their queues after an error, and take them for the answers of its next call.
    """
    from vllm.config import set_current_vllm_config

    try:
        # As while vLLM initialises the worker: FlashInfer's builder asks for the current configuration.
        with set_current_vllm_config(wrapper.worker.model_runner.vllm_config):
            return _decided(wrapper)
    except Exception as error:
        return {FAILED: f"{type(error).__name__}: {error}"}


def _decided(wrapper: WorkerWrapper) -> dict[str, str]:
    plugin = active_plugin()
    ledger = None if plugin is None else plugin.ledger
    found = {"the plugin": f"version {__version__}" if ledger is not None else "off"}
    runner = wrapper.worker.model_runner
    config = runner.vllm_config
    if ledger is None or config.parallel_config.pipeline_parallel_size > 1:
        return found  # the stages of a pipeline have different layers
    refused = sorted(name for name, outcome in ledger.outcomes.items() if outcome.state is State.REFUSED)
    found["refused patches"] = ", ".join(refused) or "none"
    found["the mode of CUDA graphs"] = str(config.compilation_config.cudagraph_mode)
    groups = [group for row in runner.attn_groups for group in row]
    for number, group in enumerate(groups, 1):
        builder: Any = type(group.metadata_builders[0])
        support = builder.get_cudagraph_support(config, group.kv_cache_spec)
        found[f"attention group {number} of {len(groups)}"] = f"{builder.__qualname__} with graphs {support.name}"
    return found


def refuse_differences(found: Sequence[dict[str, str]]) -> None:
    """Compare the decisions of all ranks.

    Args:
        found: what `decisions` returned, by rank.

    Raises:
        RanksDifferError: two ranks decided differently; names both decisions.
    """
    for subject in dict.fromkeys(subject for each in found for subject in each):
        values = [each.get(subject, ABSENT) for each in found]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RanksDifferError(
                    f"vllm-async-spec: the ranks differ in {subject}: {values[0]} on rank 0, {value} on rank {rank}; "
                    f"{_REMEDY}"
                )


def _compare(executor: Executor) -> None:
    try:
        found = executor.collective_rpc(decisions)
    except Exception as error:
        # A worker fails only if it can't find the function; all else is an executor that takes no functions.
        if "Worker failed" in str(error) or "No module named 'vllm_async_spec" in str(error):
            raise RanksDifferError(f"vllm-async-spec: a rank has no vllm-async-spec, or another; {_REMEDY}") from error
        logger.warning("vllm-async-spec: the ranks' decisions are not compared: %s: %s", type(error).__name__, error)
        return
    failed = next((f"rank {rank}: {each[FAILED]}" for rank, each in enumerate(found) if FAILED in each), None)
    if failed is not None:
        logger.warning("vllm-async-spec: the ranks' decisions are not compared: %s", failed)
        return
    if len(found) < executor.parallel_config.world_size:
        inform("vllm-async-spec: ranks are not compared: %s calls only some", type(executor).__name__)
    refuse_differences(found)


def _apply(transaction: Transaction, module: ModuleType) -> None:
    cls = module.Executor
    original = cls.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: Executor, *args: object, **kwargs: object) -> object:
        if self.parallel_config.world_size == 1:
            return original(self, *args, **kwargs)
        call = self.collective_rpc

        # Up to 0.26 vLLM's method also compiles and captures, so the ranks are asked between its two calls.
        def ask_after_the_first(method: str | Callable[..., object], *args: object, **kwargs: object) -> Any:
            result = call(method, *args, **kwargs)
            if method == "initialize_from_config":
                _compare(self)
            return result

        with temporarily() as changes:
            changes.set(self, "collective_rpc", ask_after_the_first)
            return original(self, *args, **kwargs)

    transaction.set(cls, "initialize_from_config", initialize_from_config)


IMPLEMENTATIONS = {"rank-agreement": Implementation(_apply)}
