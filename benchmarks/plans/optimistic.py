"""The V1 runner of vLLM 0.18.1 without its wait for accepted counts."""

from __future__ import annotations

from typing import Any

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, MODE_0_ENGINE


def optimistic(shape: str) -> Plan:
    """vLLM 0.18.1 without its wait for accepted counts, with it, and scheduled synchronously."""
    return Plan(
        name=f"optimistic-{shape}-mode0",
        about=f"vLLM 0.18.1 with the plugin on, off and not loaded, and synchronous, {shape} shape",
        arms=(
            _arm("stock", shape),
            _arm("plugin", shape, Plugin.ON),
            _arm("noop", shape, Plugin.NOOP),
            _arm("synchronous", shape, async_scheduling=False),
        ),
        loads=find_loads(("decode-1", "decode-32", "mixed")),
        turns=4,
        seconds=2.0,
        reference="stock",
        control="noop",
    )


def _arm(name: str, shape: str, plugin: Plugin = Plugin.STOCK, **engine: Any) -> Arm:
    return Arm(
        name,
        shape,
        plugin=plugin,
        release="0.18.1",
        runner="V1",
        acceptance=ACCEPTANCE,
        engine=MODE_0_ENGINE | {"attention_backend": "FLASH_ATTN"} | engine,
    )
