"""vLLM with the plugin off, audited."""

from __future__ import annotations

from itertools import product

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, MODE_0_ENGINE, RUNNERS, tiny_arm

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


def baseline() -> Plan:
    """vLLM in every combination of release, runner, attention backend and size that this project documents.

    The plugin is loaded and switched off, because each row is audited and the audit's agent comes with the plugin.
    """
    return Plan(
        name="baseline-mode0",
        about="vLLM with the plugin off, by release, runner and attention backend",
        arms=tuple(
            Arm(
                f"{release}-{runner}-{backend}-{shape}",
                shape,
                plugin=Plugin.NOOP,
                release=release,
                runner=runner,
                acceptance=ACCEPTANCE,
                engine=MODE_0_ENGINE | {"attention_backend": backend},
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
    """The baseline on a CPU: one release, one backend, two numbers of draft tokens."""
    return Plan(
        name="baseline-tiny",
        about="vLLM with the plugin off on a CPU, by draft tokens",
        arms=tuple(
            tiny_arm(f"K{tokens}", plugin=Plugin.NOOP, draft_tokens=tokens, labels={"K": str(tokens)})
            for tokens in (1, 3)
        ),
        loads=find_loads(("decode-4-short", "mixed-short")),
        turns=1,
        seconds=1.0,
        audit_steps=16,
    )
