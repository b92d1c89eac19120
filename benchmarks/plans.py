"""The plans that there are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from benchmarks.arms import Acceptance, Arm, Plan, PlanError, Plugin
from benchmarks.loads import find_loads
from benchmarks.shapes import Method, find_shape

GPU_ENGINE = {"dtype": "bfloat16", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
CPU_ENGINE = {"dtype": "float32", "enforce_eager": True}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # matrices of the tiny shape have no work for two
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

RUNNERS = (("0.18.1", "V1"), ("0.26.0", "V1"), ("0.26.0", "V2"), ("0.32.0", "V2"))
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
ACCEPTANCE = Acceptance(0.7)


def overhead(shape: str) -> Plan:
    """What the plugin costs or wins on a GPU, with the first of the shape's drafters."""
    method = next(iter(find_shape(shape).drafters))
    return Plan(
        name=f"overhead-{shape}",
        about=f"The plugin on, off and not loaded, {shape} shape",
        arms=tuple(
            Arm(plugin.value, shape, plugin=plugin, method=method, acceptance=ACCEPTANCE, engine=GPU_ENGINE)
            for plugin in Plugin
        ),
        loads=find_loads(("decode-1", "decode-8", "decode-32", "decode-128", "mixed")),
        turns=4,
        reference=Plugin.STOCK.value,
        control=Plugin.SHAM.value,
    )


def overhead_tiny() -> Plan:
    """The same on a CPU, where vLLM's own choice is never to schedule asynchronously with speculative decoding."""
    return Plan(
        name="overhead-tiny",
        about="The plugin on, off and not loaded, tiny shape on a CPU",
        arms=tuple(_tiny(plugin.value, plugin=plugin) for plugin in Plugin),
        loads=find_loads(("decode-1-short", "decode-4-short", "mixed-short")),
        turns=4,
        seconds=1.0,
        reference=Plugin.STOCK.value,
        control=Plugin.SHAM.value,
        keep=True,
    )


def flashinfer(
    shape: str, *, suffix: str = "", release: str | None = None, runner: str | None = None, kernels: str = "any"
) -> Plan:
    """FlashInfer with the plugin on, off and not loaded, and FlashAttention to hold it to.

    Args:
        shape: of the model.
        suffix: what the plan's name has at its end.
        release: of vLLM; None for that of this environment.
        runner: the model runner; None for vLLM's choice.
        kernels: what decodes. `any`: what each arm finds. `native`: the wrappers that are planned on the host. `xqa`:
            stock vLLM is told that it may use XQA, as if the artifact server had answered.
    """

    def arm(name: str, plugin: Plugin, attention: dict[str, Any]) -> Arm:
        return Arm(
            name,
            shape,
            plugin=plugin,
            release=release,
            runner=runner,
            acceptance=ACCEPTANCE,
            engine=GPU_ENGINE | {"attention_config": attention},
            environment={"VLLM_HAS_FLASHINFER_CUBIN": "1"} if kernels == "xqa" else {},
        )

    return Plan(
        name=f"flashinfer-{shape}{suffix}",
        about=f"FlashInfer with the plugin on, off and not loaded, and FlashAttention, {shape} shape",
        arms=(
            *(arm(plugin.value, plugin, _flashinfer(kernels)) for plugin in Plugin),
            arm("FLASH_ATTN", Plugin.STOCK, {"backend": "FLASH_ATTN"}),
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=2,
        seconds=2.0,
        reference=Plugin.STOCK.value,
        control=Plugin.SHAM.value,
    )


def flashinfer_audit(shape: str) -> Plan:
    """Where the time goes with FlashInfer and the plugin on, by release, runner and kernels."""
    return Plan(
        name=f"flashinfer-audit-{shape}",
        about=f"FlashInfer with the plugin on, by release, runner and kernels, {shape} shape",
        arms=tuple(
            Arm(
                f"{release}-{runner}-{kernels}",
                shape,
                plugin=Plugin.ON,
                release=release,
                runner=runner,
                acceptance=ACCEPTANCE,
                engine=GPU_ENGINE | {"attention_config": _flashinfer(kernels)},
                labels={"vLLM": release, "runner": runner, "kernels": kernels, "size": shape},
            )
            for release, runner, kernels in (
                *((release, runner, "any") for release in ("0.26.0", "0.32.0") for runner in ("V1", "V2")),
                ("0.32.0", "V2", "native"),
            )
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=1,
        seconds=2.0,
        repetitions=2,
        audit_steps=64,
    )


def _flashinfer(kernels: str) -> dict[str, Any]:
    return {"backend": "FLASHINFER"} | ({"use_trtllm_attention": False} if kernels == "native" else {})


def baseline() -> Plan:
    """vLLM in every combination of release, runner, attention backend and size that this project speaks of.

    The plugin is loaded and switched off, because each row is audited and the audit's agent comes with the plugin.
    """
    return Plan(
        name="baseline",
        about="vLLM with the plugin off, by release, runner and attention backend",
        arms=tuple(
            Arm(
                f"{release}-{runner}-{backend}-{shape}",
                shape,
                plugin=Plugin.SHAM,
                release=release,
                runner=runner,
                acceptance=ACCEPTANCE,
                engine=GPU_ENGINE | {"attention_backend": backend},
                labels={"vLLM": release, "runner": runner, "backend": backend, "size": shape},
            )
            for shape, (release, runner), backend in product(("8b", "1b"), RUNNERS, BACKENDS)
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=1,
        seconds=2.0,
        repetitions=2,
        audit_steps=64,
    )


def baseline_tiny() -> Plan:
    """What of the baseline a CPU can run: one release, one backend, two sizes of drafts."""
    return Plan(
        name="baseline-tiny",
        about="vLLM with the plugin off on a CPU, by draft tokens",
        arms=tuple(
            _tiny(f"K{tokens}", plugin=Plugin.SHAM, draft_tokens=tokens, labels={"K": str(tokens)}) for tokens in (1, 3)
        ),
        loads=find_loads(("decode-4-short", "mixed-short")),
        turns=1,
        seconds=1.0,
        audit_steps=16,
    )


def find_plan(name: str) -> Plan:
    """The plan of this name.

    Raises:
        PlanError: there is none.
    """
    if name not in PLANS:
        raise PlanError(f"there is no plan {name!r}; there are {', '.join(PLANS)}")
    return PLANS[name]()


def _tiny(
    name: str, *, plugin: Plugin = Plugin.STOCK, draft_tokens: int = 3, labels: dict[str, str] | None = None
) -> Arm:
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


PLANS: dict[str, Callable[[], Plan]] = {
    "overhead-tiny": overhead_tiny,
    "overhead-1b": lambda: overhead("1b"),
    "overhead-8b": lambda: overhead("8b"),
    "overhead-moe": lambda: overhead("moe"),
    "overhead-mla": lambda: overhead("mla"),
    "flashinfer-1b": lambda: flashinfer("1b"),
    "flashinfer-8b": lambda: flashinfer("8b"),
    "flashinfer-8b-native": lambda: flashinfer("8b", suffix="-native", kernels="native"),
    "flashinfer-8b-xqa": lambda: flashinfer("8b", suffix="-xqa", kernels="xqa"),
    "flashinfer-8b-v1": lambda: flashinfer("8b", suffix="-v1", runner="V1"),
    "flashinfer-8b-0.26.0-v1": lambda: flashinfer("8b", suffix="-0.26.0-v1", release="0.26.0", runner="V1"),
    "flashinfer-8b-0.26.0-v2": lambda: flashinfer("8b", suffix="-0.26.0-v2", release="0.26.0", runner="V2"),
    "flashinfer-audit-8b": lambda: flashinfer_audit("8b"),
    "baseline": baseline,
    "baseline-tiny": baseline_tiny,
}
