"""All plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.arms import Plan, PlanError
from benchmarks.plans.defaults import defaults
from benchmarks.plans.flashinfer import flashinfer, flashinfer_before, flashinfer_older_gpu
from benchmarks.plans.optimistic import optimistic
from benchmarks.plans.overhead import overhead, overhead_tiny
from benchmarks.plans.v1_runner import v1_runner


def find_plan(name: str) -> Plan:
    """The plan of this name.

    Raises:
        PlanError: no plan has this name.
    """
    if name not in PLANS:
        raise PlanError(f"there is no plan {name!r}; there are {', '.join(PLANS)}")
    return PLANS[name]()


def _itself(plan: Plan) -> Plan:
    return plan


PLANS: dict[str, Callable[[], Plan]] = {
    "overhead-tiny": overhead_tiny,
    "overhead-1b": lambda: overhead("1b"),
    "overhead-8b": lambda: overhead("8b"),
    "overhead-moe": lambda: overhead("moe"),
    "overhead-mla": lambda: overhead("mla"),
    **{plan.name: partial(_itself, plan) for plan in defaults()},
    "flashinfer-1b-mode0": lambda: flashinfer("1b"),
    "flashinfer-8b-mode0": lambda: flashinfer("8b"),
    "flashinfer-8b-fa2-mode0": lambda: flashinfer_older_gpu("8b"),
    "flashinfer-8b-0.26.0-V1-mode0": lambda: flashinfer_before("8b", "V1"),
    "flashinfer-8b-0.26.0-V2-mode0": lambda: flashinfer_before("8b", "V2"),
    "optimistic-1b-mode0": lambda: optimistic("1b"),
    "optimistic-8b-mode0": lambda: optimistic("8b"),
    "v1-1b-0.26.0": lambda: v1_runner("1b", "0.26.0"),
    "v1-8b-0.26.0": lambda: v1_runner("8b", "0.26.0"),
    "v1-moe-0.26.0": lambda: v1_runner("moe", "0.26.0"),
    "v1-a3b-0.26.0": lambda: v1_runner("a3b", "0.26.0"),
}
