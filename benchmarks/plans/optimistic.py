"""The V1 runner of vLLM 0.18.1 without its wait for accepted counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, COMPILED_ENGINE, GPU_ENGINE


def optimistic(shape: str, *, compiled: bool = False) -> Plan:
    """vLLM 0.18.1 without its wait for accepted counts, with it, and scheduled synchronously.

    `compiled` takes vLLM's default compilation, which adds a minute to the start: Inductor, and piecewise CUDA graphs
    for drafting too. Without it drafting launches one operation at a time.
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
