"""What the benchmarks add to a worker of `vllm serve`: the loader of arranged weights, and a method that tells facts.

vLLM imports this module in each worker, before it loads the model: it is the server's `--worker-extension-cls`.
"""

from __future__ import annotations

import json
from typing import Any

import benchmarks.loader  # noqa: F401  registers the load format
from benchmarks.facts import engine_facts


class BenchWorker:
    """Becomes a base of vLLM's worker class."""

    model_runner: Any
    vllm_config: Any

    def bench_facts(self) -> str:
        """`facts.engine_facts` of this worker, as JSON."""
        return json.dumps(engine_facts(self.model_runner, self.vllm_config))
