"""The V1 runner of vLLM 0.26.0 with and without the plugin, beside the V2 runner of the same release."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, BESIDE_OTHERS, DEFAULT_ENGINE
from benchmarks.shapes import find_shape

_FITS_BESIDE = 10e9
"""Parameters of the largest shape of which four engines fit on one H200."""


def v1_runner(shape: str) -> Plan:
    """The V1 runner with the plugin on, off and not loaded, and the V2 runner, at vLLM's defaults with FLASH_ATTN."""
    beside = find_shape(shape).parameters <= _FITS_BESIDE
    engine: dict[str, Any] = DEFAULT_ENGINE | {"attention_backend": "FLASH_ATTN"} | (BESIDE_OTHERS if beside else {})
    arm = partial(Arm, shape=shape, release="0.26.0", acceptance=ACCEPTANCE, engine=engine)
    return Plan(
        name=f"v1-{shape}-0.26.0",
        about=f"vLLM 0.26.0: the V1 runner with the plugin on, off and not loaded, and the V2 runner, {shape} shape",
        arms=(
            *(arm(plugin.value, plugin=plugin, runner="V1") for plugin in Plugin),
            arm("V2", runner="V2"),
        ),
        loads=find_loads(("decode-1", "decode-8", "decode-32", "decode-128", "mixed")),
        turns=4,
        seconds=2.0,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
        keep=beside,
    )
