"""All soaks."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks import older_gpu, runner_on_cpu
from benchmarks.arms import Arm, PlanError, Plugin
from benchmarks.loads import Load
from benchmarks.plans.engines import (
    ATTENTIVE,
    BESIDE_OTHERS,
    CPU_ENGINE,
    TRITON_PREFILL,
    all_reduce_environment,
    tiny_arm,
)
from benchmarks.shapes import Method, Shape, find_shape

WHOLE_KEYS = "whole keys"
"""In `steps`: plans of FlashInfer's that split no keys."""
_SINKS = {"gpt-oss"}
"""Shapes whose attention has sinks, which FlashAttention takes in bfloat16 only."""
_RUNNERS = (("0.18.1", "V1"), ("0.26.0", "V1"), ("0.26.0", "V2"), ("0.32.0", "V2"), ("0.33.0", "V2"))
_NATIVE = {"use_trtllm_attention": False}
"""FlashInfer's wrappers alone, without TRT-LLM's kernels."""
_E5M2 = {"disable_flashinfer_q_quantization": True}


@dataclass(frozen=True, slots=True)
class Soak:
    """One engine that must give stock's tokens under any delays."""

    name: str
    subject: Arm
    load: Load
    undrafted: bool = False
    """Whether stock gives the expected tokens without drafts, because stock with drafts is wrong."""
    prepared: tuple[str, ...] = ()
    """What must have prepared steps (`steps`), or the soak has shown nothing of it."""

    @property
    def noisy(self) -> bool:
        """Whether rounding may swap tokens further apart than `engine.NEAR`: in batches without drafts, in bfloat16,
        and in a state that a request carries along.

        Stock then serves the same requests again under random arrivals, and its difference from itself is the tolerance
        for the subject.
        """
        carries = find_shape(self.subject.shape).has_linear_attention
        return self.undrafted or carries or self.subject.engine["dtype"] == "bfloat16"

    @property
    def oracle(self) -> Arm:
        """Stock, which gives the expected tokens."""
        method = None if self.undrafted else self.subject.method
        return replace(self.subject, name="stock", plugin=Plugin.STOCK, method=method)


def find_soak(name: str) -> Soak:
    """The soak of this name.

    Raises:
        PlanError: no soak has this name.
    """
    if name not in SOAKS:
        raise PlanError(f"there is no soak {name!r}; there are {', '.join(SOAKS)}")
    return SOAKS[name]


def _undrafted(shape: Shape) -> bool:
    return "kv_lora_rank" in shape.target  # MLA: see the findings


def _soak(release: str, runner: str, backend: str, *kinds: str, shape: str = "1b", ranks: int = 1) -> Soak:
    """A soak on a GPU.

    `kinds` may have `native`, FlashInfer's wrappers alone; `fa2`, the same with the kernels of older GPUs; `e5m2`, a KV
    cache of that format, with the setting that vLLM needs for it; `ragged`, short prompts, and a token budget two below
    the tokens of all requests with all their drafts; `wide`, more requests at once and longer outputs, so that many
    steps have the requests of the step before, and FlashInfer's keys stay whole on Hopper. `ranks` are tensor parallel.
    Compilation and graphs are vLLM's defaults.
    """
    wrappers, ragged, e5m2 = {"native", "fa2"}.intersection(kinds), "ragged" in kinds, "e5m2" in kinds
    running, output = (40, (128, 384)) if "wide" in kinds else (16, (1, 120))
    prepared = (WHOLE_KEYS,) if backend == "FLASHINFER" else ("steady-states", runner_on_cpu.OTHER_ROWS)
    model, tp = find_shape(shape), [f"tp{ranks}"] if ranks > 1 else []
    environment = all_reduce_environment(release, ranks)
    if "fa2" in kinds:
        environment = older_gpu.ENVIRONMENT
    elif backend == "FLASHINFER" and not wrappers and not e5m2:
        # Stock gets the kernels that the plugin enables; otherwise stock would add in another order.
        environment = environment | {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
    return Soak(
        name="-".join([release, runner, backend, *([shape] if shape != "1b" else []), *kinds, *tp]),
        subject=Arm(
            "subject",
            shape,
            plugin=Plugin.ON,
            release=release,
            runner=runner,
            method=next(iter(model.drafters)),
            acceptance=ATTENTIVE,
            engine=BESIDE_OTHERS
            | ({"tensor_parallel_size": ranks} if ranks > 1 else {})
            | {
                "dtype": "bfloat16" if shape in _SINKS else "float16",  # rounding rarely decides between two tokens
                "enable_prefix_caching": False,  # a soak repeats its prompts, so the cache would hold all of them
                "attention_config": {"backend": backend} | (_NATIVE if wrappers else _E5M2 if e5m2 else {}),
                "max_num_batched_tokens": 62 if ragged else 512,
            }
            | ({"kv_cache_dtype": "fp8_e5m2"} if e5m2 else {})
            | (TRITON_PREFILL if model.has_linear_attention else {}),
            environment=environment,
        ),
        load=Load("soak", requests=96, running=running, prompt=(1, 8 if ragged else 700), output=output),
        undrafted=_undrafted(model),
        prepared=prepared if "wide" in kinds else (),
    )


def _tiny_soak(shape: str, method: Method, ranks: int = 1, **engine: Any) -> Soak:
    """A soak on a CPU, with engine arguments beyond the usual."""
    several = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    return Soak(
        name=f"{shape}-tp{ranks}" if several else shape,
        subject=replace(
            tiny_arm("subject", plugin=Plugin.ON),
            shape=shape,
            method=method,
            acceptance=ATTENTIVE,
            engine=CPU_ENGINE | several | engine,
        ),
        load=Load("soak-tiny", requests=16, running=4, prompt=(1, 64), output=(1, 48)),
        undrafted=_undrafted(find_shape(shape)),
    )


def _runner_on_cpu(release: str) -> Soak:
    """A soak of what the plugin changes in the V1 runner on a GPU, on a CPU, with batches that go on.

    It takes vLLM's CPU build of that release.
    """
    tiny = _tiny_soak("tiny", Method.DRAFT_MODEL, async_scheduling=True)
    return replace(
        tiny,
        name=f"{release}-V1-CPU_ATTN",
        subject=replace(
            tiny.subject,
            release=release,
            runner="V1",
            environment={**tiny.subject.environment, **runner_on_cpu.ENVIRONMENT},
        ),
        load=Load("soak-tiny-wide", requests=72, running=24, prompt=(1, 64), output=(48, 120)),
        prepared=(*runner_on_cpu.PATCHES, runner_on_cpu.OTHER_ROWS),
    )


SOAKS: dict[str, Soak] = {
    soak.name: soak
    for soak in (
        _tiny_soak("tiny", Method.DRAFT_MODEL),
        # MLA passes [tokens, heads, size], of which vLLM's own rotary kernel rotates the wrong rows (findings).
        _tiny_soak(
            "tiny-mla",
            Method.MTP,
            async_scheduling=True,
            compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        ),
        # vLLM's linear attention on a CPU takes bfloat16 only.
        _tiny_soak("tiny-hybrid", Method.MTP, async_scheduling=True, dtype="bfloat16"),
        _tiny_soak("tiny-gpt-oss", Method.EAGLE, async_scheduling=True),
        # The tiny draft model has one head, which two ranks can't share.
        _tiny_soak("tiny", Method.EAGLE, ranks=2),
        _runner_on_cpu("0.26.0"),
        *(_soak(*each, "FLASHINFER") for each in (*_RUNNERS[1:], ("0.32.0", "V1"))),
        *(_soak("0.32.0", runner, "FLASHINFER", "native") for runner in ("V1", "V2")),
        *(_soak("0.32.0", "V2", "FLASHINFER", each) for each in ("fa2", "e5m2", "wide")),
        *(_soak(*each, "FLASH_ATTN") for each in _RUNNERS),
        _soak("0.18.1", "V1", "FLASH_ATTN", shape="8b"),
        _soak("0.24.0", "V1", "FLASH_ATTN"),
        *(_soak(release, "V1", "FLASH_ATTN", "wide") for release in ("0.24.0", "0.26.0")),
        *(_soak(release, "V1", "FLASH_ATTN", shape="moe") for release in ("0.24.0", "0.26.0")),
        *(_soak("0.26.0", "V1", "FLASH_ATTN", shape=shape) for shape in ("gpt-oss", "hybrid")),
        *(_soak("0.32.0", runner, "FLASH_ATTN", shape="local") for runner in ("V1", "V2")),
        *(
            _soak("0.32.0", "V2", backend, shape=shape)
            for shape in ("mla", "mla-dense")
            for backend in ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
        ),
        *(_soak(*each, "FLASHINFER", ranks=2) for each in (("0.32.0", "V2"), ("0.26.0", "V2"), ("0.26.0", "V1"))),
        *(_soak(*each, "FLASH_ATTN", ranks=2) for each in (("0.26.0", "V1"), ("0.18.1", "V1"))),
        *(_soak("0.32.0", "V2", each, "ragged", shape="mla-dense") for each in ("FLASHMLA", "TRITON_MLA")),
    )
}
