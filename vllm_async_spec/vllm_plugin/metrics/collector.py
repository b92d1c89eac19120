"""Makes the plugin's metrics for `prometheus_client` at each scrape.

Imported only where vLLM has imported `prometheus_client` already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_async_spec._version import __version__
from vllm_async_spec.vllm_plugin.ledger import count_states
from vllm_async_spec.vllm_plugin.metrics.snapshot import Snapshot
from vllm_async_spec.vllm_plugin.settings import Settings

MAX_CAUSES = 50
"""How many causes get a label of their own."""
OTHER = "other"
"""The label of all further causes."""


class Collector:
    """The collector that `prometheus_client` calls at each scrape, for the server's current counters."""

    def __init__(self, snapshot: Callable[[], Snapshot], settings: Settings) -> None:
        self._snapshot = snapshot
        self._settings = settings
        # In order of appearance: a cause keeps its label, so that no counter goes backwards.
        self._causes: dict[str, None] = {}

    def describe(self) -> Iterable[Metric]:
        """Reserve no names, so that a registry accepts this collector twice."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The current metrics."""
        snapshot = self._snapshot()
        yield from self._waits(snapshot)
        fallbacks = CounterMetricFamily(
            "vllm:async_spec_exact_fallbacks",
            "Batches that waited for the device because a request in them needs exact token counts on the host.",
            labels=["reason"],
        )
        for reason, count in sorted(snapshot.fallbacks.items()):
            fallbacks.add_metric([reason], count)
        yield fallbacks
        patches = GaugeMetricFamily(
            "vllm:async_spec_patches", "Number of vllm-async-spec patches in each state.", labels=["state"]
        )
        for state, count in count_states(snapshot.patches).items():
            patches.add_metric([state], count)
        yield patches
        scheduling = GaugeMetricFamily(
            "vllm:async_spec_async_scheduling",
            "Whether scheduling is asynchronous (1) or not (0), and who decided.",
            labels=["decided_by", "runner", "backend"],
        )
        engines: dict[tuple[str, str, str], bool] = {}
        for engine in snapshot.engines:  # an earlier engine of this server may have the same labels
            labels = (engine.decided_by, engine.runner, engine.backend)
            engines[labels] = engine.asynchronous and engines.get(labels, True)
        for labels, asynchronous in engines.items():
            scheduling.add_metric(labels, asynchronous)
        yield scheduling
        refused = GaugeMetricFamily(
            "vllm:async_spec_refused_patch",
            "Always 1: a patch of vllm-async-spec that a process refused, and the reason.",
            labels=["patch", "reason"],
        )
        for name, reason in sorted(snapshot.refused.items()):
            refused.add_metric([name, reason], 1)
        yield refused
        info = GaugeMetricFamily(
            "vllm:async_spec_info", "Version and settings of vllm-async-spec.", labels=["version", "mode", "sync"]
        )
        info.add_metric([__version__, self._settings.mode.value, self._settings.sync.value], 1)
        yield info

    def _waits(self, snapshot: Snapshot) -> Iterable[Metric]:
        labels = ["cause", "kind"]
        waits = CounterMetricFamily(
            "vllm:async_spec_host_waits",
            "Number of times that the host waited for the device, by cause.",
            labels=labels,
        )
        seconds = CounterMetricFamily(
            "vllm:async_spec_host_wait_seconds", "Seconds that the host waited for the device, by cause.", labels=labels
        )
        capped = Snapshot()
        for (cause, kind), count in sorted(snapshot.waits.items()):
            capped.add_wait(self._label(cause), kind, count, snapshot.seconds[cause, kind])
        for (cause, kind), count in capped.waits.items():
            waits.add_metric([cause, kind], count)
            seconds.add_metric([cause, kind], capped.seconds[cause, kind])
        yield from (waits, seconds)

    def _label(self, cause: str) -> str:
        if cause not in self._causes and len(self._causes) < MAX_CAUSES:
            self._causes[cause] = None
        return cause if cause in self._causes else OTHER
