"""Plans of servers, at vLLM's default configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.arms import Arm, PlanError, Plugin
from benchmarks.plans.engines import ACCEPTANCE, BESIDE_OTHERS, COMPILED_ENGINE, CPU_ENGINE, CPU_ENVIRONMENT
from benchmarks.serving.plan import ServeLoad, ServePlan
from benchmarks.shapes import Method

_LONGEST = 16_384
"""Most tokens of a request. vLLM's default is what the model takes, whose cache does not fit beside other servers."""
_CACHE = {"8b": 8 << 30, "1b": 6 << 30}
"""Bytes of each server's KV cache: 62,000 tokens of an 8b, 190,000 tokens of a 1b."""
_GOODPUT = {"ttft": 500.0, "tpot": 10.0}


def _closed(concurrency: int, each_second: float) -> ServeLoad:
    return ServeLoad(f"closed-{concurrency}", concurrency=concurrency, each_second=each_second)


_LOADS = (
    *(ServeLoad(f"rate-{rate:g}", rate=rate) for rate in (1.0, 4.0, 8.0, 16.0, 32.0)),
    _closed(1, 1.0),
    _closed(8, 5.0),
    _closed(32, 14.0),
    _closed(128, 25.0),
    ServeLoad("prefixes", concurrency=32, each_second=14.0, prefixes=8),
)


def _served(
    name: str,
    about: str,
    shape: str,
    backends: Mapping[str, tuple[Plugin, str]],
    *,
    release: str | None,
    runner: str | None = None,
) -> ServePlan:
    """A plan whose arms are pairs of the plugin's state and an attention backend, by name."""
    engine: dict[str, Any] = COMPILED_ENGINE | BESIDE_OTHERS | {"max_model_len": _LONGEST}
    engine["kv_cache_memory_bytes"] = _CACHE[shape]
    return ServePlan(
        name=name,
        about=about,
        arms=tuple(
            Arm(
                arm,
                shape,
                plugin=plugin,
                release=release,
                runner=runner,
                method=Method.EAGLE,
                acceptance=ACCEPTANCE,
                engine=engine | {"attention_backend": backend},
            )
            for arm, (plugin, backend) in backends.items()
        ),
        loads=_LOADS,
        goodput=_GOODPUT,
    )


def _three(backend: str) -> dict[str, tuple[Plugin, str]]:
    return {plugin.value: (plugin, backend) for plugin in Plugin}


def serve_8b() -> ServePlan:
    """vLLM 0.32.0 with FLASHINFER, and FLASH_ATTN beside it."""
    return _served(
        "serve-8b",
        "vllm serve 0.32.0 with FLASHINFER, the plugin on, off and not loaded, and with FLASH_ATTN, 8b shape",
        "8b",
        _three("FLASHINFER") | {"FLASH_ATTN": (Plugin.STOCK, "FLASH_ATTN")},
        release="0.32.0",
    )


def serve_optimistic() -> ServePlan:
    """vLLM 0.18.1 with FLASH_ATTN."""
    return _served(
        "serve-1b-0.18.1",
        "vllm serve 0.18.1 with FLASH_ATTN, the plugin on, off and not loaded, 1b shape",
        "1b",
        _three("FLASH_ATTN"),
        release="0.18.1",
    )


def serve_before() -> ServePlan:
    """The V1 runner of vLLM 0.26.0 with FLASHINFER."""
    return _served(
        "serve-1b-0.26.0-V1",
        "vllm serve 0.26.0 with the V1 runner and FLASHINFER, the plugin on, off and not loaded, 1b shape",
        "1b",
        _three("FLASHINFER") | {"FLASH_ATTN": (Plugin.STOCK, "FLASH_ATTN")},
        release="0.26.0",
        runner="V1",
    )


def serve_tiny() -> ServePlan:
    """The same on a CPU, with shorter prompts and outputs; it says nothing about a GPU."""
    return ServePlan(
        name="serve-tiny",
        about="vllm serve with the plugin on, off and not loaded, tiny shape on a CPU",
        arms=tuple(
            Arm(
                plugin.value,
                "tiny",
                plugin=plugin,
                method=Method.EAGLE,
                acceptance=ACCEPTANCE,
                engine=CPU_ENGINE | {"max_model_len": 2048},
                environment=CPU_ENVIRONMENT,
            )
            for plugin in Plugin
        ),
        loads=(
            *(ServeLoad(f"rate-{rate:g}", rate=rate) for rate in (2.0, 8.0, 16.0)),
            _closed(1, 6.0),
            _closed(8, 20.0),
            ServeLoad("prefixes", concurrency=8, each_second=20.0, prefixes=4),
        ),
        seconds=2.0,
        scale=16,
        output_scale=4,
        goodput={"ttft": 200.0, "tpot": 20.0},
    )


SERVE_PLANS: dict[str, Callable[[], ServePlan]] = {
    "serve-tiny": serve_tiny,
    "serve-8b": serve_8b,
    "serve-1b-0.18.1": serve_optimistic,
    "serve-1b-0.26.0-V1": serve_before,
}


def find_serve_plan(name: str) -> ServePlan:
    """The served plan of this name.

    Raises:
        PlanError: no plan has this name.
    """
    if name not in SERVE_PLANS:
        raise PlanError(f"there is no served plan {name!r}; there are {', '.join(SERVE_PLANS)}")
    return SERVE_PLANS[name]()
