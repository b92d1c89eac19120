"""One engine of the demo, in a process of its own: `python -m vllm_async_spec.demo.engine SETUP.json`.

It takes commands through `json_child`. The engine is in this process, not in a child process, so that the probe sees
the thread that drives the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_async_spec.audit.engine import draft_counts
from vllm_async_spec.json_child import serve
from vllm_async_spec.patching import temporarily

Setup = dict[str, Any]
"""What the parent asks for: `target`, `draft` (or null), `draft_tokens`, `async_scheduling` (or null), `prompts`,
`max_tokens`."""


class DemoEngine:
    """A vLLM engine and the one batch of prompts that it is asked to complete."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import vllm

        from vllm_async_spec.vllm_plugin.patches.async_scheduling import open_cpu_gate

        self._cuda = torch.cuda.is_available()
        if not self._cuda and setup["async_scheduling"] and os.environ.get("VLLM_ASYNC_SPEC") == "off":
            open_cpu_gate()
        options: dict[str, Any] = {}
        if setup["draft"] is not None:
            options["speculative_config"] = {
                "method": "draft_model",
                "model": setup["draft"],
                "num_speculative_tokens": setup["draft_tokens"],
            }
        if setup["async_scheduling"] is not None:
            options["async_scheduling"] = setup["async_scheduling"]
        if self._cuda:
            # Four engines share the GPU. Each has a fixed cache size, because free memory depends on the others.
            # Modes batch a token differently, so rounding differs: float16 is the finest that FlashAttention takes.
            options |= {"dtype": "float16", "gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 1 << 30}
            # Compiling models this small takes longer than the whole demo.
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        else:
            options |= {"dtype": "float32", "enforce_eager": True}
        self._llm = vllm.LLM(
            setup["target"],
            max_model_len=768,
            max_num_seqs=len(setup["prompts"]),
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=0,
            **options,
        )
        self._prompts = setup["prompts"]
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=setup["max_tokens"], ignore_eos=True)

    def describe(self) -> dict[str, Any]:
        """What the engine really runs with."""
        core = self._llm.llm_engine.engine_core.engine_core
        runner = self._runner()
        return {
            "async_scheduling": core.batch_queue is not None,
            "runner": "V2" if type(runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
        }

    def generate(self) -> dict[str, Any]:
        """Complete the prompts: tokens, seconds, and what was drafted and accepted."""
        drafts, accepted = draft_counts(self._llm)
        start = time.perf_counter()
        outputs = self._llm.generate(self._prompts, self._sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        more_drafts, more_accepted = draft_counts(self._llm)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "seconds": seconds,
            "drafts": more_drafts - drafts,
            "accepted": more_accepted - accepted,
        }

    def probe(self) -> dict[str, Any]:
        """Complete the prompts under the probe: host reads a step of the newest step (`now`) and the one before."""
        from vllm_async_spec.audit.host_reads import CpuProbe, CudaProbe

        probe = CudaProbe() if self._cuda else CpuProbe()
        runner = self._runner()
        # The V1 runner has a method for the forward alone; the V2 runner's execute_model launches the forward last.
        seam = "_model_forward" if hasattr(runner, "_model_forward") else "execute_model"
        original: Callable[..., Any] = getattr(runner, seam)
        with temporarily() as changes, probe as reads:
            changes.set(runner, seam, lambda *args, **kwargs: probe.forward(lambda: original(*args, **kwargs)))
            self._llm.generate(self._prompts, self._sampling, use_tqdm=False)
        now, late = reads.per_step()
        return {"steps": reads.steps, "now": now, "late": late, "by": {"now": reads.now, "late": reads.late}}

    def _runner(self) -> Any:
        core = self._llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner


def main() -> None:
    """Serve commands until the input ends."""
    serve(lambda: DemoEngine(json.loads(sys.argv[1])), "describe", "generate", "probe")


if __name__ == "__main__":
    main()
