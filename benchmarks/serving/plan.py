"""Plans of servers as plain data: arms, the loads that a client puts on them, and the order of steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.arms import Arm, among, check_turns
from benchmarks.audited import AUDIT_STEPS

_FEWEST = 4
"""Fewest requests of a load."""
AUDIT = -1
"""In place of a pass: the step is an audit."""


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """Requests that arrive at a rate (open loop), or of which a number is always running (closed loop)."""

    name: str
    rate: float | None = None
    """Requests a second; their gaps are those of a Poisson process."""
    concurrency: int | None = None
    """Requests that run at once; the next arrives when one has finished."""
    each_second: float = 0.0
    """Requests a second that a closed loop is expected to complete: how many it gets, the same for all arms."""
    prefixes: int = 0
    """Long prefixes that the prompts share; 0 for prompts that share nothing."""

    def requests(self, seconds: float) -> int:
        """Requests that keep a server busy for about this long."""
        return max(self.concurrency or 0, _FEWEST, round(seconds * (self.rate or self.each_second)))


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Arms, each with a server of its own, and loads; arms take turns within each load."""

    name: str
    about: str
    arms: tuple[Arm, ...]
    loads: tuple[ServeLoad, ...]
    turns: int = 4
    """Turns of each arm in each load; the order of the arms is reversed every other time."""
    seconds: float = 6.0
    """About how long a load lasts."""
    reference: str = "stock"
    control: str = "noop"
    keep: bool = True
    """Whether the servers of all arms stay side by side; else each arm's server ends before the next starts."""
    scale: int = 1
    """Divides the lengths of prompts."""
    output_scale: int = 1
    """Divides the lengths of outputs."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Latencies in ms that a request must keep to count for goodput: `ttft`, `tpot`."""
    audited: tuple[str, ...] = ()
    """Closed loops under which servers with the plugin loaded are audited, each in a server of its own, at the end."""
    audit_steps: int = AUDIT_STEPS
    sampled: int = 512
    """Greedy requests, and as many seeded requests, whose tokens are compared with the reference's."""

    def __post_init__(self) -> None:
        check_turns(self.turns)

    def named(self, only: str) -> list[Arm]:
        """The arms whose name is `only`, or one of several with commas between; all arms if empty.

        Raises:
            PlanError: no arm has one of these names.
        """
        return among(self.name, self.arms, "arm", "only", only)

    def chosen(self, loads: str) -> list[ServeLoad]:
        """The loads of these names, with commas between; all loads if empty.

        Raises:
            PlanError: no load has one of these names.
        """
        return among(self.name, self.loads, "load", "loads", loads)


@dataclass(frozen=True, slots=True)
class Step:
    """What one server is asked for at once: a load in one pass, or its tokens, where `load` is None."""

    arm: Arm
    load: ServeLoad | None = None
    number: int = 0
    """The pass, or `AUDIT`."""

    @property
    def audits(self) -> bool:
        """Whether it is an audit, which needs a server of its own."""
        return self.number == AUDIT

    @property
    def name(self) -> str:
        if self.load is None:
            return f"{self.arm.name}, tokens"
        return f"{self.arm.name}, {self.load.name}, {'audit' if self.audits else f'pass {self.number}'}"


def steps(plan: ServePlan) -> list[Step]:
    """Every step of a plan, in order.

    Tokens come first, the reference's before all. Then each load has two passes, forwards and backwards, before the
    next load begins: a run that is cut off has whole comparisons of fewer loads. Without `keep` an arm's steps of a
    pass come together, because each change of arms starts a server. Audits come last. Stock has none: the audit's
    agent comes with the plugin, and the plugin that is off stands for stock.
    """
    audits = [
        Step(arm, load, AUDIT) for arm in plan.arms if arm.has_agent for load in plan.loads if load.name in plan.audited
    ]
    return [*_timed(plan), *audits]


def _timed(plan: ServePlan) -> list[Step]:
    first = sorted(plan.arms, key=lambda arm: arm.name != plan.reference)
    if plan.keep:
        pairs = [(number, number + 1) for number in range(0, plan.turns, 2)]
        loads = [
            Step(arm, load, number)
            for pair in pairs
            for load in plan.loads
            for number in pair
            for arm in _turn(first, number)
        ]
        return [Step(arm) for arm in first] + loads
    found: list[Step] = []
    for number in range(plan.turns):
        for arm in _turn(first, number):
            found += [Step(arm)] * (number == 0) + [Step(arm, load, number) for load in plan.loads]
    return found


def _turn(arms: list[Arm], number: int) -> Iterable[Arm]:
    return arms[:: -1 if number % 2 else 1]
