"""All plans."""

from collections.abc import Callable
from functools import partial

from benchmarks.arms import Plan, PlanError
from benchmarks.plans.defaults import defaults
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
    **{f"overhead-{shape}": partial(overhead, shape) for shape in ("1b", "8b", "moe", "mla")},
    **{plan.name: partial(_itself, plan) for plan in defaults()},
    **{plan.name: partial(_itself, plan) for plan in v1_runner()},
}
