"""What arms of several plans have in common: arguments of engines, environments, acceptances."""

from __future__ import annotations

from benchmarks.arms import Acceptance, Arm, Means, Plugin
from benchmarks.shapes import Method

COMPILED_ENGINE = {"dtype": "bfloat16"}
"""vLLM compiles as it would by itself."""
GPU_ENGINE = COMPILED_ENGINE | {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
BESIDE_OTHERS = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}
"""Of engines on one GPU. Told its cache's size, vLLM does not work it out from what memory is free, and so does not
mind others that start or end there; the share is what must be free at the start."""
SIX_OF_8B = BESIDE_OTHERS | {"kv_cache_memory_bytes": 2 << 30}
"""With 23 GiB each, 4 of them a cache's, six would be more than an H200 has. This cache has 15,000 tokens of an 8b;
mixed arrivals keep it at 10,000."""
FOUR_OF_8B = BESIDE_OTHERS | {"kv_cache_memory_bytes": 6 << 30}
"""This cache has 49,000 tokens of an 8b, so that 128 requests of 264 tokens run at once."""
CPU_ENGINE = {"dtype": "float32", "enforce_eager": True}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # matrices of the tiny shape have no work for two
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

FLASHINFER = {"backend": "FLASHINFER"}
NATIVE = {"use_trtllm_attention": False}
"""FlashInfer without TRT-LLM's kernels: its wrappers alone."""

RUNNERS = (("0.18.1", "V1"), ("0.26.0", "V1"), ("0.26.0", "V2"), ("0.32.0", "V2"))
ACCEPTANCE = Acceptance(0.7)
STIRRED = Acceptance(0.9, Means.STIRRED)


def tiny_arm(
    name: str, *, plugin: Plugin = Plugin.STOCK, draft_tokens: int = 3, labels: dict[str, str] | None = None
) -> Arm:
    """An arm of the tiny shape on a CPU, with a draft model."""
    return Arm(
        name,
        "tiny",
        plugin=plugin,
        method=Method.DRAFT_MODEL,
        draft_tokens=draft_tokens,
        acceptance=ACCEPTANCE,
        engine=CPU_ENGINE,
        environment=CPU_ENVIRONMENT,
        labels=labels or {},
    )
