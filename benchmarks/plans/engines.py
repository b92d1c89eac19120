"""Engine arguments, environments and acceptances that several plans share."""

from typing import Any

from benchmarks.arms import Acceptance, Arm, Means, Plugin
from benchmarks.shapes import Method

DEFAULT_ENGINE: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": None, "max_num_seqs": None}
"""vLLM's defaults; None is vLLM's own choice, where `engine` would choose for its loads."""
BESIDE_OTHERS = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}
"""For engines that share a GPU. With the cache size given, vLLM does not derive it from free memory, so other engines
may start or end meanwhile. The utilisation is the share that must be free at the start."""
CPU_ENGINE = {"dtype": "float32", "enforce_eager": True}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the tiny shape's matrices are too small for two threads
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

TRITON_PREFILL = {"gdn_prefill_backend": "triton"}
"""For shapes with linear attention: vLLM's own choice on Hopper are FlashInfer's kernels of a prefill, which need
nvidia-cutlass-dsl and are compiled when they first start."""

ACCEPTANCE = Acceptance(0.7)
ATTENTIVE = Acceptance(0.9, Means.ATTENTIVE)


def all_reduce_environment(release: str | None, ranks: int) -> dict[str, str]:
    """Variables for several ranks of 0.26.0, whose default reads address 0 where NVLink multicast is off, as in many
    virtual machines. Later releases notice that and choose the same."""
    return {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"} if ranks > 1 and release == "0.26.0" else {}


def own_seed(release: str | None, ranks: int, plugin: Plugin) -> dict[str, int]:
    """Engine arguments of an arm that runs beside the others.

    Where FlashInfer draws the name of the ranks' socket from vLLM's generator, engines of one seed ask for the same one
    (docs/findings.md). Other seeds change no greedy token.
    """
    one_socket = ranks > 1 and release in {"0.18.1", "0.20.2"}
    return {"seed": list(Plugin).index(plugin)} if one_socket else {}


def tiny_arm(name: str, *, plugin: Plugin) -> Arm:
    """An arm of the tiny shape on a CPU, with a draft model."""
    return Arm(
        name,
        "tiny",
        plugin=plugin,
        method=Method.DRAFT_MODEL,
        acceptance=ACCEPTANCE,
        engine=CPU_ENGINE,
        environment=CPU_ENVIRONMENT,
    )
