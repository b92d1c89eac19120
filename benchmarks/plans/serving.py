"""Plans of servers, at vLLM's default configuration."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.arms import Arm, PlanError, Plugin
from benchmarks.plans.defaults import PUBLISHED, SEVERAL_GPUS, Published
from benchmarks.plans.engines import ACCEPTANCE, BESIDE_OTHERS, CPU_ENGINE, CPU_ENVIRONMENT, DEFAULT_ENGINE
from benchmarks.serving.plan import ServeLoad, ServePlan
from benchmarks.shapes import Method

_LONGEST = 16_384
"""Most tokens of a request. vLLM's default is what the model takes, whose cache does not fit beside other servers."""
_CACHE = {"8b": 8 << 30, "1b": 6 << 30, "moe": 3 << 30}
"""Bytes of each rank's KV cache: 62,000 tokens of an 8b, 190,000 tokens of a 1b, 92,000 tokens of each moe engine."""
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


def _served(which: Published) -> ServePlan:
    engine: dict[str, Any] = DEFAULT_ENGINE | BESIDE_OTHERS | {"max_model_len": _LONGEST}
    engine["kv_cache_memory_bytes"] = _CACHE[which.shape]
    return ServePlan(
        name=f"serve-{which.name}",
        about=f"vllm serve {which.about}",
        arms=which.arms(engine | which.parallel),
        loads=_LOADS,
        goodput=_GOODPUT,
        # With one request at a time an engine of two is idle, and an audit would wait for steps of its own.
        audited=("closed-32",) if which.has_experts and which.gpus > 1 else ("closed-1", "closed-32"),
    )


def serve_tiny(ranks: int = 1) -> ServePlan:
    """The same on a CPU, with shorter prompts and outputs; it says nothing about a GPU."""
    several = {} if ranks == 1 else {"tensor_parallel_size": ranks}
    return ServePlan(
        name=f"serve-tiny-tp{ranks}" if several else "serve-tiny",
        about="vllm serve with the plugin on, off and not loaded, tiny shape on a CPU"
        + (f", tensor parallel of {ranks} ranks" if several else ""),
        arms=tuple(
            Arm(
                plugin.value,
                "tiny",
                plugin=plugin,
                method=Method.EAGLE,
                acceptance=ACCEPTANCE,
                engine=CPU_ENGINE | {"max_model_len": 2048} | several,
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
        audited=("closed-8",),
    )


SERVE_PLANS: dict[str, Callable[[], ServePlan]] = {
    "serve-tiny": serve_tiny,
    "serve-tiny-tp2": partial(serve_tiny, 2),
    **{f"serve-{which.name}": partial(_served, which) for which in (*PUBLISHED, *SEVERAL_GPUS)},
}


def find_serve_plan(name: str) -> ServePlan:
    """The served plan of this name.

    Raises:
        PlanError: no plan has this name.
    """
    if name not in SERVE_PLANS:
        raise PlanError(f"there is no served plan {name!r}; there are {', '.join(SERVE_PLANS)}")
    return SERVE_PLANS[name]()
