"""Registers the plugin's collector in each Prometheus registry from which vLLM serves `/metrics`."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.metrics.publisher import Publisher
from vllm_async_spec.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

publisher = Publisher()
"""The publisher of this process."""

_NAME = "get_prometheus_registry"


def _apply(transaction: Transaction, module: ModuleType) -> None:
    from vllm_async_spec.vllm_plugin.metrics.collector import Collector

    collector = Collector(publisher.snapshot, Settings.read())
    original, several = getattr(module, _NAME), module.multiprocess.MultiProcessCollector
    make_several = several.__init__

    @functools.wraps(original)
    def get_prometheus_registry() -> CollectorRegistry:
        if publisher.failure is not None:
            logger.warning(
                "vllm-async-spec: /metrics shows the counts of this process only, because the others can't write "
                "theirs to a file (%s); set TMPDIR to a writable directory",
                publisher.failure,
            )
        registry = original()
        registry.register(collector)
        return registry

    # With several API servers, a new registry answers each request, and vLLM's function does not make it.
    @functools.wraps(make_several)
    def __init__(self: object, registry: CollectorRegistry | None, *args: Any, **kwargs: Any) -> None:
        make_several(self, registry, *args, **kwargs)
        if registry is not None:
            registry.register(collector)

    transaction.set(several, "__init__", __init__)
    transaction.set_function(module, _NAME, get_prometheus_registry)


IMPLEMENTATIONS = {"prometheus-registry": Implementation(_apply)}
