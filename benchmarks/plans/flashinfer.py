"""FlashInfer: the plugin on, off and not loaded, by release, runner and kernels."""

from __future__ import annotations

from typing import Any

from benchmarks import older_gpu
from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.plans.engines import ACCEPTANCE, FLASHINFER, MODE_0_ENGINE, NATIVE, SIX_OF_8B, side_by_side


def flashinfer() -> Plan:
    """FlashInfer with and without the plugin on a machine without the artifact server, and three arms to compare.

    `stock-xqa` may use XQA, as if the server had answered. `plugin-native` may not: it decodes with the wrappers that
    are planned on the host, as `stock` does.
    """

    def arm(name: str, plugin: Plugin, attention: dict[str, Any], **environment: str) -> Arm:
        engine = MODE_0_ENGINE | SIX_OF_8B | {"attention_config": attention}
        return Arm(name, "8b", plugin=plugin, acceptance=ACCEPTANCE, engine=engine, environment=environment)

    return side_by_side(
        name="flashinfer-8b-mode0",
        about="FlashInfer with the plugin on, off and not loaded, and FlashAttention, 8b shape",
        arms=(
            *(arm(plugin.value, plugin, FLASHINFER) for plugin in Plugin),
            arm("plugin-native", Plugin.ON, FLASHINFER | NATIVE),
            arm("stock-xqa", Plugin.STOCK, FLASHINFER, VLLM_HAS_FLASHINFER_CUBIN="1"),
            arm("FLASH_ATTN", Plugin.STOCK, {"backend": "FLASH_ATTN"}),
        ),
    )


def flashinfer_before(runner: str) -> Plan:
    """FlashInfer in one runner of vLLM 0.26.0, which decodes drafts with the wrappers alone."""

    def arm(name: str, plugin: Plugin, backend: str = "FLASHINFER") -> Arm:
        engine = MODE_0_ENGINE | SIX_OF_8B | {"attention_backend": backend}
        return Arm(name, "8b", plugin=plugin, release="0.26.0", runner=runner, acceptance=ACCEPTANCE, engine=engine)

    return side_by_side(
        name=f"flashinfer-8b-0.26.0-{runner}-mode0",
        about=f"FlashInfer in the {runner} runner of vLLM 0.26.0 with the plugin on, off and not loaded, 8b shape",
        arms=(
            *(arm(plugin.value, plugin) for plugin in Plugin),
            arm("FLASH_ATTN", Plugin.STOCK, "FLASH_ATTN"),
        ),
    )


def flashinfer_older_gpu() -> Plan:
    """FlashInfer with the wrappers and kernels that it runs on Ampere and Ada, on any GPU."""
    engine = MODE_0_ENGINE | SIX_OF_8B | {"attention_config": FLASHINFER | NATIVE}
    return side_by_side(
        name="flashinfer-8b-fa2-mode0",
        about="FlashInfer as on Ampere and Ada with the plugin on, off and not loaded, 8b shape",
        arms=tuple(
            Arm(
                plugin.value,
                "8b",
                plugin=plugin,
                acceptance=ACCEPTANCE,
                engine=engine,
                environment=older_gpu.ENVIRONMENT,
            )
            for plugin in Plugin
        ),
    )
