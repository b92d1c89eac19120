"""vLLM's default configuration, as operators get it: what is published for each release, runner and shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, BESIDE_OTHERS, DEFAULT_ENGINE, all_reduce_environment, own_seed
from benchmarks.shapes import find_shape

_LOADS = ("decode-1", "decode-8", "decode-32", "decode-128", "mixed")
_CACHE = {
    "8b": BESIDE_OTHERS | {"kv_cache_memory_bytes": 5 << 30},
    "8b-context": BESIDE_OTHERS | {"kv_cache_memory_bytes": 9 << 30},
}
"""Caches of an 8b: 39,000 tokens, enough for 128 requests of 272, or 71,000, enough for two requests of 33,000."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a plan measures beside the others of its release."""

    loads: tuple[str, ...]
    draft_tokens: int = 3
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments that are not vLLM's defaults, of which the plan's name tells."""
    backend: str | None = None
    """The attention backend that it is for; None for all."""


@dataclass(frozen=True, slots=True)
class Published:
    """One release, runner and shape, with the attention backend that the plugin is for."""

    shape: str
    release: str
    runner: str
    backend: str
    name: str
    """Of its plans, after `defaults-` or `serve-`."""
    gpus: int = 1
    """Ranks of tensor parallelism; for a shape with experts, engines of data parallelism with experts divided."""

    def arms(self, engine: dict[str, Any], draft_tokens: int = 3) -> tuple[Arm, ...]:
        """The plugin on, off and not loaded, and FLASH_ATTN beside FLASHINFER; `engine` without the backend."""

        def arm(name: str, plugin: Plugin, backend: str) -> Arm:
            return Arm(
                name,
                self.shape,
                plugin=plugin,
                release=self.release,
                runner=self.runner,
                draft_tokens=draft_tokens,
                acceptance=ACCEPTANCE,
                engine=engine | own_seed(self.release, self.gpus, plugin) | {"attention_backend": backend},
                environment=all_reduce_environment(self.release, self.gpus),
            )

        three = tuple(arm(plugin.value, plugin, self.backend) for plugin in Plugin)
        return three if self.backend == "FLASH_ATTN" else (*three, arm("FLASH_ATTN", Plugin.STOCK, "FLASH_ATTN"))

    @property
    def has_experts(self) -> bool:
        """Whether the shape has experts."""
        return find_shape(self.shape).expert_parameters > 0

    @property
    def parallel(self) -> dict[str, Any]:
        """Engine arguments of a server on these GPUs.

        vLLM starts an API server for each engine of data parallelism. One is enough here, and it alone can stop an
        audit that it has started.
        """
        if self.gpus == 1:
            return {}
        if self.has_experts:
            return {"data_parallel_size": self.gpus, "enable_expert_parallel": True, "api_server_count": 1}
        return {"tensor_parallel_size": self.gpus}

    @property
    def divided(self) -> str:
        """How its server is divided, in words with a comma before; empty for one rank."""
        if self.gpus == 1:
            return ""
        if self.has_experts:
            rounding = "experts round by batch, so tokens tell only where those of noop do not differ"
            return f", data parallel with experts divided on {self.gpus} ranks; {rounding}"
        return f", tensor parallel on {self.gpus} ranks"

    @property
    def variants(self) -> Mapping[str, Variant]:
        """Its part of `VARIANTS`: all of its backend on one GPU; none of data parallelism, which vLLM's `LLM` does not
        have."""
        if self.gpus > 1:
            return {} if self.has_experts else {"": VARIANTS[""]}
        return {suffix: each for suffix, each in VARIANTS.items() if each.backend in (None, self.backend)}

    @property
    def about(self) -> str:
        """What its arms are, in words."""
        beside = "" if self.backend == "FLASH_ATTN" else ", and FLASH_ATTN beside it"
        return f"{self.release}, runner {self.runner}, {self.backend}{beside}, {self.shape} shape{self.divided}"


PUBLISHED = (
    Published("8b", "0.32.0", "V2", "FLASHINFER", "8b"),
    Published("1b", "0.32.0", "V2", "FLASHINFER", "1b"),
    Published("8b", "0.26.0", "V2", "FLASHINFER", "8b-0.26.0-V2"),
    Published("8b", "0.26.0", "V1", "FLASHINFER", "8b-0.26.0-V1"),
    Published("8b", "0.18.1", "V1", "FLASH_ATTN", "8b-0.18.1"),
    Published("1b", "0.18.1", "V1", "FLASH_ATTN", "1b-0.18.1"),
    Published("1b", "0.24.0", "V1", "FLASH_ATTN", "1b-0.24.0"),
)

SEVERAL_GPUS = (
    Published("8b", "0.32.0", "V2", "FLASHINFER", "8b-tp2", gpus=2),
    Published("8b", "0.26.0", "V2", "FLASHINFER", "8b-0.26.0-V2-tp2", gpus=2),
    Published("8b", "0.26.0", "V1", "FLASHINFER", "8b-0.26.0-V1-tp2", gpus=2),
    Published("8b", "0.18.1", "V1", "FLASH_ATTN", "8b-0.18.1-tp2", gpus=2),
    Published("moe", "0.32.0", "V2", "FLASHINFER", "moe-dp2", gpus=2),
    Published("moe", "0.26.0", "V1", "FLASH_ATTN", "moe-0.26.0-V1-dp2", gpus=2),
)
"""The same on several GPUs."""

_BATCHES = ("decode-1", "decode-32", "decode-128")
_LARGER_GRAPHS = {"max_cudagraph_capture_size": 1024}
"""A step of 128 requests has 768 tokens with five drafts, and 1,024 with seven; vLLM's default captures 512."""

VARIANTS = {
    "": Variant(_LOADS),
    **{f"-K{number}": Variant(_BATCHES, number) for number in (1, 5, 7)},
    "-K5-graphs": Variant(_BATCHES, 5, _LARGER_GRAPHS, "FLASH_ATTN"),
    "-K7-graphs": Variant(("decode-128",), 7, _LARGER_GRAPHS, "FLASHINFER"),
    "-context": Variant(("context-1k", "context-8k", "context-32k")),
}
"""The plans of each, by the end of their names."""


def defaults() -> Iterator[Plan]:
    """For each of `PUBLISHED`: batches and mixed load; the same by number of draft tokens; and by length of context."""
    for which in (*PUBLISHED, *SEVERAL_GPUS):
        for suffix, variant in which.variants.items():
            yield _defaults(which, suffix, variant)


def _defaults(which: Published, suffix: str, variant: Variant) -> Plan:
    engine: dict[str, Any] = DEFAULT_ENGINE | _CACHE.get(
        f"{which.shape}{suffix}", _CACHE.get(which.shape, BESIDE_OTHERS)
    )
    return Plan(
        name=f"defaults-{which.name}{suffix}",
        about=f"vLLM {which.about}, {variant.draft_tokens} draft tokens, compiled by vLLM",
        arms=which.arms(engine | which.parallel | dict(variant.engine), variant.draft_tokens),
        loads=find_loads(variant.loads),
        turns=4,
        seconds=2.0,
        repetitions=1,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
        keep=True,  # a pass of engines side by side takes two minutes, in which the host changes little
        audited=("decode-32",) if which.gpus > 1 else (),
    )
