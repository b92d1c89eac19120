"""What the benchmarks add to each worker of vLLM: the loader of arranged weights, and methods for `collective_rpc`.

vLLM imports this module in each worker, before it loads the model: it is the engine's `worker_extension_cls`. With
several ranks each worker is a process of its own, so whatever needs a model runner goes through these methods.
"""

import json
import sys
from typing import Any

import benchmarks.loader  # noqa: F401  registers the load format
from benchmarks.facts import engine_facts

_PLUGIN = "vllm_async_spec.vllm_plugin.plugin"


class BenchWorker:
    """Becomes a base of vLLM's worker class."""

    rank: int
    model_runner: Any
    vllm_config: Any

    def bench_facts(self) -> str:
        """`facts.engine_facts` of this worker, as JSON."""
        return json.dumps(engine_facts(self.model_runner, self.vllm_config))

    def bench_begin_delays(self, seed: int) -> None:
        """Delay this rank's device at random; each rank draws its own delays. Raises what `Delays` raises."""
        from benchmarks.soak.delays import Delays

        self._bench_delays = Delays(self.model_runner, seed + self.rank)
        self._bench_delays.begin()

    def bench_end_delays(self) -> dict[str, int]:
        """End the delays that `bench_begin_delays` began, and return their number by place."""
        return self._bench_delays.end()

    def bench_break(self, control: str) -> None:
        """Break this rank on purpose, see `soak.engine.CONTROLS`."""
        from benchmarks.soak.engine import CONTROLS

        CONTROLS[control](self.model_runner)

    def bench_count_steps(self) -> None:
        """Count the steps that patches prepare, see `soak.steps`."""
        if _PLUGIN in sys.modules:  # stock has none
            from benchmarks.soak import steps

            steps.count()

    def bench_steps(self) -> dict[str, int]:
        """Steps that patches have prepared, by patch."""
        steps = sys.modules.get("benchmarks.soak.steps")
        return steps.counts() if steps else {}

    def bench_fallbacks(self) -> dict[str, int]:
        """The fallbacks of the plugin in this process since its start, by reason."""
        policy = sys.modules.get("vllm_async_spec.sync_policy")  # stock has no plugin
        return dict(policy.sync_report().fallbacks) if policy else {}
