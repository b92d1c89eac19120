"""The plans that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks import older_gpu
from benchmarks.arms import Acceptance, Arm, Means, Plan, PlanError, Plugin
from benchmarks.loads import Load, find_loads
from benchmarks.shapes import Method, find_shape
from benchmarks.soak_runs import Soak

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

RUNNERS = (("0.18.1", "V1"), ("0.26.0", "V1"), ("0.26.0", "V2"), ("0.32.0", "V2"))
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
ACCEPTANCE = Acceptance(0.7)
STIRRED = Acceptance(0.9, Means.STIRRED)
FLASHINFER = {"backend": "FLASHINFER"}
NATIVE = {"use_trtllm_attention": False}
E5M2 = {"disable_flashinfer_q_quantization": True}


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
        control=Plugin.NOOP.value,
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
        control=Plugin.NOOP.value,
        keep=True,
    )


def flashinfer(shape: str) -> Plan:
    """FlashInfer as each finds it on a machine without the artifact server, and what else there is to hold it to.

    `stock-xqa` is told that it may use XQA, as if the server had answered. `plugin-native` is told not to, and decodes
    with the wrappers that are planned on the host, as `stock` does.
    """

    def arm(name: str, plugin: Plugin, attention: dict[str, Any], **environment: str) -> Arm:
        engine = GPU_ENGINE | SIX_OF_8B | {"attention_config": attention}
        return Arm(name, shape, plugin=plugin, acceptance=ACCEPTANCE, engine=engine, environment=environment)

    return _flashinfer(
        name=f"flashinfer-{shape}",
        about=f"FlashInfer with the plugin on, off and not loaded, and FlashAttention, {shape} shape",
        arms=(
            *(arm(plugin.value, plugin, FLASHINFER) for plugin in Plugin),
            arm("plugin-native", Plugin.ON, FLASHINFER | NATIVE),
            arm("stock-xqa", Plugin.STOCK, FLASHINFER, VLLM_HAS_FLASHINFER_CUBIN="1"),
            arm("FLASH_ATTN", Plugin.STOCK, {"backend": "FLASH_ATTN"}),
        ),
    )


def defaults(shape: str) -> Plan:
    """What an operator gets: vLLM compiles and captures as it does by itself."""

    def arm(name: str, plugin: Plugin, backend: str) -> Arm:
        engine = COMPILED_ENGINE | FOUR_OF_8B | {"attention_config": {"backend": backend}}
        return Arm(name, shape, plugin=plugin, acceptance=ACCEPTANCE, engine=engine)

    return Plan(
        name=f"defaults-{shape}",
        about=f"FlashInfer with the plugin on, off and not loaded, and FlashAttention, compiled by vLLM, {shape} shape",
        arms=(
            *(arm(plugin.value, plugin, "FLASHINFER") for plugin in Plugin),
            arm("FLASH_ATTN", Plugin.STOCK, "FLASH_ATTN"),
        ),
        loads=find_loads(("decode-1", "decode-32", "decode-128", "mixed")),
        turns=4,
        seconds=2.0,
        repetitions=2,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
        keep=True,
    )


def flashinfer_before(shape: str, runner: str) -> Plan:
    """FlashInfer in vLLM 0.26.0, which decodes drafts with the wrappers alone, in one of its two runners."""

    def arm(name: str, plugin: Plugin, backend: str = "FLASHINFER") -> Arm:
        engine = GPU_ENGINE | SIX_OF_8B | {"attention_backend": backend}
        return Arm(name, shape, plugin=plugin, release="0.26.0", runner=runner, acceptance=ACCEPTANCE, engine=engine)

    return _flashinfer(
        name=f"flashinfer-{shape}-0.26.0-{runner}",
        about=f"FlashInfer in the {runner} runner of vLLM 0.26.0 with the plugin on, off and not loaded, {shape} shape",
        arms=(
            *(arm(plugin.value, plugin) for plugin in Plugin),
            arm("FLASH_ATTN", Plugin.STOCK, "FLASH_ATTN"),
        ),
    )


def flashinfer_older_gpu(shape: str) -> Plan:
    """FlashInfer with the wrappers and kernels that it runs on Ampere and Ada, on whatever GPU there is."""
    engine = GPU_ENGINE | SIX_OF_8B | {"attention_config": FLASHINFER | NATIVE}
    return _flashinfer(
        name=f"flashinfer-{shape}-fa2",
        about=f"FlashInfer as on Ampere and Ada with the plugin on, off and not loaded, {shape} shape",
        arms=tuple(
            Arm(
                plugin.value,
                shape,
                plugin=plugin,
                acceptance=ACCEPTANCE,
                engine=engine,
                environment=older_gpu.ENVIRONMENT,
            )
            for plugin in Plugin
        ),
    )


def _flashinfer(name: str, about: str, arms: tuple[Arm, ...]) -> Plan:
    """Engines side by side, so that a pass takes two minutes, and the host changes little in it."""
    return Plan(
        name=name,
        about=about,
        arms=arms,
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=4,
        seconds=2.0,
        repetitions=2,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
        keep=True,
    )


def flashinfer_audit(shape: str) -> Plan:
    """Where the time goes with FlashInfer and the plugin, by release, runner and kernels.

    Beside the V1 runner, whose own work may take the host longer than the device: FLASH_ATTN in it, the plugin off.
    """
    attention = {
        "any": FLASHINFER,
        "native": FLASHINFER | NATIVE,
        "FLASH_ATTN": {"backend": "FLASH_ATTN"},
    }

    def arm(release: str, runner: str, kernels: str) -> Arm:
        return Arm(
            f"{release}-{runner}-{kernels}",
            shape,
            plugin=Plugin.NOOP if kernels == "FLASH_ATTN" else Plugin.ON,
            release=release,
            runner=runner,
            acceptance=ACCEPTANCE,
            engine=GPU_ENGINE | {"attention_config": attention[kernels]},
            labels={"vLLM": release, "runner": runner, "kernels": kernels, "size": shape},
        )

    return Plan(
        name=f"flashinfer-audit-{shape}",
        about=f"FlashInfer with the plugin on, by release, runner and kernels, {shape} shape",
        arms=(
            *(arm(release, "V1", kernels) for release in ("0.26.0", "0.32.0") for kernels in ("any", "FLASH_ATTN")),
            *(arm(release, "V2", "any") for release in ("0.26.0", "0.32.0")),
            arm("0.32.0", "V2", "native"),
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=1,
        seconds=2.0,
        repetitions=2,
        audit_steps=64,
    )


def optimistic(shape: str, *, compiled: bool = False) -> Plan:
    """vLLM 0.18.1 without its wait for accepted counts, with it, and scheduled synchronously.

    `compiled` leaves compilation to vLLM, whose own choice takes a minute more to start: Inductor, and CUDA graphs for
    the pieces of drafting between attention too, which otherwise is launched one operation at a time.
    """
    base = COMPILED_ENGINE if compiled else GPU_ENGINE
    arm = partial(_flash_arm, shape=shape, release="0.18.1", runner="V1", base=base)

    return Plan(
        name=f"optimistic-{shape}{'-compiled' if compiled else ''}",
        about=f"vLLM 0.18.1 with the plugin on, off and not loaded, and synchronous, {shape} shape"
        f"{', compiled by vLLM' if compiled else ''}",
        arms=(
            arm("stock", plugin=Plugin.STOCK),
            arm("plugin", plugin=Plugin.ON),
            arm("noop", plugin=Plugin.NOOP),
            arm("synchronous", plugin=Plugin.STOCK, async_scheduling=False),
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=4,
        seconds=2.0,
        reference="stock",
        control="noop",
    )


def optimistic_peers(shape: str) -> Plan:
    """vLLM 0.18.1 with the plugin, and what later releases make of the same."""
    return Plan(
        name=f"optimistic-peers-{shape}",
        about=f"vLLM 0.18.1 with the plugin beside later releases without it, {shape} shape",
        arms=(
            _flash_arm("0.18.1, plugin", shape, Plugin.ON, "0.18.1", "V1"),
            _flash_arm("0.20.2", shape, Plugin.STOCK, "0.20.2", "V1"),
            _flash_arm("0.26.0", shape, Plugin.STOCK, "0.26.0", "V2"),
            _flash_arm("0.32.0", shape, Plugin.STOCK, "0.32.0", "V2"),
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=4,
        seconds=2.0,
        reference="0.18.1, plugin",
        control=None,
    )


def _flash_arm(
    name: str,
    shape: str,
    plugin: Plugin,
    release: str,
    runner: str,
    base: Mapping[str, Any] = GPU_ENGINE,
    **engine: Any,
) -> Arm:
    return Arm(
        name,
        shape,
        plugin=plugin,
        release=release,
        runner=runner,
        acceptance=ACCEPTANCE,
        engine={**base, "attention_backend": "FLASH_ATTN"} | engine,
    )


def optimistic_audit(shape: str) -> Plan:
    """Where the time of vLLM 0.18.1 goes with the plugin on and off."""
    return Plan(
        name=f"optimistic-audit-{shape}",
        about=f"vLLM 0.18.1 with the plugin on and off, audited, {shape} shape",
        arms=tuple(
            Arm(
                plugin.value,
                shape,
                plugin=plugin,
                release="0.18.1",
                runner="V1",
                acceptance=ACCEPTANCE,
                engine=GPU_ENGINE | {"attention_backend": "FLASH_ATTN"},
                labels={"vLLM": "0.18.1", "plugin": "off" if plugin is Plugin.NOOP else "on", "size": shape},
            )
            for plugin in (Plugin.ON, Plugin.NOOP)
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=1,
        seconds=2.0,
        repetitions=2,
        audit_steps=64,
    )


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
                plugin=Plugin.NOOP,
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
            _tiny(f"K{tokens}", plugin=Plugin.NOOP, draft_tokens=tokens, labels={"K": str(tokens)}) for tokens in (1, 3)
        ),
        loads=find_loads(("decode-4-short", "mixed-short")),
        turns=1,
        seconds=1.0,
        audit_steps=16,
    )


def find_soak(name: str) -> Soak:
    """The soak of this name.

    Raises:
        PlanError: there is none.
    """
    if name not in SOAKS:
        raise PlanError(f"there is no soak {name!r}; there are {', '.join(SOAKS)}")
    return SOAKS[name]


def _soak(release: str, runner: str, backend: str, *kinds: str, shape: str = "1b") -> Soak:
    """A soak on a GPU.

    Args:
        release: of vLLM.
        runner: `V1` or `V2`.
        backend: of attention.
        kinds: `native`, FlashInfer's wrappers alone; `fa2`, the same with the kernels of older GPUs; `e5m2`, a cache of
            that format, with what vLLM needs to start with it; `ragged`, short prompts, and two tokens fewer in a step
            than all requests with all their drafts have.
        shape: of the models.
    """
    wrappers, ragged, e5m2 = {"native", "fa2"}.intersection(kinds), "ragged" in kinds, "e5m2" in kinds
    environment: dict[str, str] = {}
    if "fa2" in kinds:
        environment = older_gpu.ENVIRONMENT
    elif backend == "FLASHINFER" and not wrappers and not e5m2:
        # Stock is given the kernels that the plugin opens, or it would add up in another order.
        environment = {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
    return Soak(
        name="-".join([release, runner, backend, *([shape] if shape != "1b" else []), *kinds]),
        subject=Arm(
            "subject",
            shape,
            plugin=Plugin.ON,
            release=release,
            runner=runner,
            method=next(iter(find_shape(shape).drafters)),
            acceptance=STIRRED,
            # In float16 few roundings decide between two tokens.
            engine=GPU_ENGINE
            | BESIDE_OTHERS
            | {
                "dtype": "float16",
                "attention_config": {"backend": backend} | (NATIVE if wrappers else E5M2 if e5m2 else {}),
                "max_num_batched_tokens": 62 if ragged else 512,
            }
            | ({"kv_cache_dtype": "fp8_e5m2"} if e5m2 else {}),
            environment=environment,
        ),
        load=Load("soak", requests=96, running=16, prompt=(1, 8 if ragged else 700), output=(1, 120)),
        undrafted="kv_lora_rank" in find_shape(shape).target,
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
    "defaults-1b": lambda: defaults("1b"),
    "defaults-8b": lambda: defaults("8b"),
    "flashinfer-1b": lambda: flashinfer("1b"),
    "flashinfer-8b": lambda: flashinfer("8b"),
    "flashinfer-8b-fa2": lambda: flashinfer_older_gpu("8b"),
    "flashinfer-8b-0.26.0-V1": lambda: flashinfer_before("8b", "V1"),
    "flashinfer-8b-0.26.0-V2": lambda: flashinfer_before("8b", "V2"),
    "flashinfer-audit-8b": lambda: flashinfer_audit("8b"),
    "optimistic-1b": lambda: optimistic("1b"),
    "optimistic-8b": lambda: optimistic("8b"),
    "optimistic-1b-compiled": lambda: optimistic("1b", compiled=True),
    "optimistic-8b-compiled": lambda: optimistic("8b", compiled=True),
    "optimistic-peers-8b": lambda: optimistic_peers("8b"),
    "optimistic-audit-1b": lambda: optimistic_audit("1b"),
    "optimistic-audit-8b": lambda: optimistic_audit("8b"),
    "baseline": baseline,
    "baseline-tiny": baseline_tiny,
}

_TINY_SOAK = Load("soak-tiny", requests=16, running=4, prompt=(1, 64), output=(1, 48))
SOAKS: dict[str, Soak] = {
    soak.name: soak
    for soak in (
        Soak(
            name="tiny",
            subject=replace(_tiny("subject", plugin=Plugin.ON), acceptance=STIRRED),
            load=_TINY_SOAK,
        ),
        Soak(
            name="tiny-mla",
            # vLLM's own kernel rotates other rows than it should where heads have a dimension of theirs (findings).
            subject=replace(
                _tiny("subject", plugin=Plugin.ON),
                shape="tiny-mla",
                method=Method.MTP,
                acceptance=STIRRED,
                engine=CPU_ENGINE
                | {"async_scheduling": True, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
            ),
            load=_TINY_SOAK,
            undrafted=True,
        ),
        *(_soak(*each, "FLASHINFER") for each in (*RUNNERS[1:], ("0.32.0", "V1"))),
        *(_soak("0.32.0", runner, "FLASHINFER", "native") for runner in ("V1", "V2")),
        *(_soak("0.32.0", "V2", "FLASHINFER", each) for each in ("fa2", "e5m2")),
        *(_soak(*each, "FLASH_ATTN") for each in RUNNERS),
        _soak("0.18.1", "V1", "FLASH_ATTN", shape="8b"),
        *(_soak("0.32.0", runner, "FLASH_ATTN", shape="local") for runner in ("V1", "V2")),
        *(
            _soak("0.32.0", "V2", backend, shape=shape)
            for shape in ("mla", "mla-dense")
            for backend in ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
        ),
        *(_soak("0.32.0", "V2", each, "ragged", shape="mla-dense") for each in ("FLASHMLA", "TRITON_MLA")),
    )
}
