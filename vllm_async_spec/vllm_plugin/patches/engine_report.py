"""Reports the engine's runner, attention backends and patches, once in each engine."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.engine_facts import backend_names, runner_kind
from vllm_async_spec.vllm_plugin.graph_limit import graph_limit
from vllm_async_spec.vllm_plugin.ledger import Implementation, State, count_states, summary
from vllm_async_spec.vllm_plugin.log import inform, logger
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine
from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher
from vllm_async_spec.vllm_plugin.runner_choice import alternative
from vllm_async_spec.vllm_plugin.scheduling import is_on, noted
from vllm_async_spec.vllm_plugin.state import active_plugin

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import WorkerWrapper


def _apply(transaction: Transaction, module: ModuleType) -> None:
    cls = module.WorkerWrapperBase
    original = cls.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: WorkerWrapper, *args: Any, **kwargs: Any) -> object:
        result: object = original(self, *args, **kwargs)
        try:
            if self.worker.rank == 0:
                _report(self)
        except Exception as error:  # must not end a worker that stock vLLM starts
            logger.warning("vllm-async-spec: the engine's state is not reported: %s: %s", type(error).__name__, error)
        return result

    transaction.set(cls, "initialize_from_config", initialize_from_config)


def _report(wrapper: WorkerWrapper) -> None:
    """Publish the engine's state, and log it once per server."""
    runner = wrapper.worker.model_runner
    config = runner.vllm_config
    decision = noted(config)
    backends = ", ".join(backend_names(runner)) or "none"
    engine = Engine(is_on(config), decision.by if decision else "unknown", runner_kind(runner), backends)
    publisher.report(engine=engine)
    plugin = active_plugin()
    if plugin is not None and plugin.ledger is not None:
        waiting = [name for name, state in publisher.snapshot().patches.items() if state is State.WAITING]
        publisher.report(foreseen=plugin.ledger.foresee(waiting))
    counts = count_states(publisher.snapshot().patches)
    line = f"the engine has the {engine.runner} runner, attention {engine.backend}; patches: {summary(counts)}"
    if publisher.is_first(line):
        inform("vllm-async-spec: %s", line)
    for advice in (alternative(config, plugin), graph_limit(config)):
        if advice is not None and publisher.is_first(advice):
            inform("vllm-async-spec: %s", advice)


IMPLEMENTATIONS = {"engine-report": Implementation(_apply)}
