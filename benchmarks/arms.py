"""Comparisons as plain data: an arm is one way of serving, a plan is arms, loads and the order of turns."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from benchmarks.loads import Load
from benchmarks.shapes import Method, find_shape

WORKSPACE_BYTES = 4e9
"""Memory of an engine beside weights and KV cache: CUDA context, drafter, CUDA graphs and activations."""
_DEFAULT_REQUESTS = 1024
"""vLLM's own `max_num_seqs` on a GPU of 70 GB or more."""


class Plugin(str, enum.Enum):
    """State of the plugin in an arm."""

    STOCK = "stock"
    """vLLM does not load the plugin."""
    NOOP = "noop"
    """The plugin is loaded and off: a difference from stock is noise, or a fault of the comparison."""
    ON = "plugin"


class Means(str, enum.Enum):
    """How the acceptance rate is set."""

    WEIGHTS = "weights"
    """The drafter's and the target's weights are arranged (`acceptance`): any release, any runner, greedy."""
    ATTENTIVE = "attentive"
    """The same, and the target's layers affect tokens (`attentive_weights`), so tokens show errors of attention."""
    SAMPLER = "sampler"
    """vLLM's own synthetic rejection sampling, in the releases that have it, and on a GPU."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often a draft is accepted, given that those before it were."""

    share: float
    means: Means = Means.WEIGHTS


def tensor_ranks(engine: Mapping[str, Any]) -> int:
    """Ranks of tensor parallelism of an engine with these arguments."""
    return int(engine.get("tensor_parallel_size", 1))


def expected_length(share: float, draft_tokens: int) -> float:
    """Mean tokens a step and request: the target's own, and drafts before the first wrong one."""
    return sum(share**accepted for accepted in range(draft_tokens + 1))


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of serving: a row of the table."""

    name: str
    shape: str
    plugin: Plugin = Plugin.STOCK
    release: str | None = None
    """The vLLM release that it must be; None for that of this environment."""
    runner: str | None = None
    """The model runner that it must be, `V1` or `V2`; None for vLLM's choice."""
    method: Method | None = Method.EAGLE
    draft_tokens: int = 3
    acceptance: Acceptance | None = None
    """None: the acceptance of plain dummy weights, which is close to zero."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM`, which override all others."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_gpu(self) -> bool:
        """Whether a CPU would take hours, or run out of memory: for all shapes but the tiny ones."""
        return not self.shape.startswith("tiny")

    @property
    def has_agent(self) -> bool:
        """Whether its engine can be audited: the audit's agent is part of the plugin, so stock has none."""
        return self.plugin is not Plugin.STOCK

    @property
    def gpus(self) -> int:
        """GPUs that its engines take: with data parallelism there are several."""
        return tensor_ranks(self.engine) * int(self.engine.get("data_parallel_size", 1))

    @property
    def weight_bytes(self) -> float:
        """Bytes of the target's weights in bfloat16; the drafter's and the KV cache come on top.

        Raises:
            ShapeError: no shape has this arm's name.
        """
        return 2 * find_shape(self.shape).parameters

    @property
    def gpu_weight_bytes(self) -> float:
        """Bytes of the target's weights on each GPU, in bfloat16; raises what `weight_bytes` raises.

        Data parallelism divides experts, as tensor parallelism does, and repeats all other weights.
        """
        shape = find_shape(self.shape)
        experts = shape.expert_parameters
        return 2 * ((shape.parameters - experts) / tensor_ranks(self.engine) + experts / self.gpus)

    @property
    def workspace_bytes(self) -> float:
        """Bytes on each GPU beside weights and KV cache.

        Where vLLM chooses `max_num_seqs`, it warms its sampler up for so many requests that logits come on top.
        """
        if self.engine.get("max_num_seqs", 0) is not None:
            return WORKSPACE_BYTES
        rows = _DEFAULT_REQUESTS * (1 + self.draft_tokens)
        logits: int = 4 * rows * find_shape(self.shape).target["vocab_size"]
        return WORKSPACE_BYTES + 2 * logits

    @property
    def gpu_bytes(self) -> float:
        """Bytes that its engine takes on each GPU, with the KV cache that it declares; raises as `weight_bytes`."""
        cache: int = self.engine.get("kv_cache_memory_bytes", 0)
        return self.gpu_weight_bytes + cache + self.workspace_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """Arms, their loads, and the number of turns of each arm."""

    name: str
    about: str
    arms: tuple[Arm, ...]
    loads: tuple[Load, ...]
    turns: int
    """Turns of each arm; the order of the arms is reversed every other time."""
    reference: str
    """The arm that others are compared with."""
    control: str
    """The arm that must not differ from the reference."""
    seconds: float = 3.0
    """Timed runs of a load repeat in each turn until they have taken this long."""
    repetitions: int = 3
    """Fewest timed runs of a load in a turn."""
    keep: bool = False
    """Whether the engines stay side by side between turns, which saves starts and hides differences between starts."""
    audited: tuple[str, ...] = ()
    """Loads under which each rank of engines with the plugin loaded is audited, see `audits`."""

    def __post_init__(self) -> None:
        check_turns(self.turns)

    def named(self, only: str) -> list[Arm]:
        """The arms whose name contains `only`, or one of several with commas between; all arms if empty."""
        return [arm for arm in self.arms if any(part in arm.name for part in only.split(","))]

    def audits(self, number: int, arm: Arm) -> tuple[str, ...]:
        """Loads under which `arm` is audited at the end of its turn in pass `number`.

        An audit may leave an engine slower, so one that stays is audited at its end; one that does not, at its first.
        """
        due = number == (self.turns - 1 if self.keep else 0)
        return self.audited if due and arm.has_agent else ()

    def order(self) -> list[tuple[int, Arm]]:
        """Every turn, as the number of its pass and its arm: forwards, backwards, forwards, ...

        The reference comes last in the first pass and first in the second. A run that is cut off in the second pass
        then has the reference twice, and ratios of all arms that ran twice.
        """
        last = {self.control: 1, self.reference: 2}
        arms = sorted(self.arms, key=lambda arm: last.get(arm.name, 0))
        return [(number, arm) for number in range(self.turns) for arm in arms[:: -1 if number % 2 else 1]]


class PlanError(ValueError):
    """A plan can't be run; the message says why and what to do."""


def check_turns(turns: int) -> None:
    """Raise PlanError if the number of turns is odd."""
    if turns % 2:
        raise PlanError(f"--turns is {turns}; it must be even, because every other turn runs the arms backwards")


class _Part(Protocol):
    @property
    def name(self) -> str: ...


_OfPlan = TypeVar("_OfPlan", bound=_Part)


def among(plan: str, parts: Sequence[_OfPlan], kind: str, option: str, given: str) -> list[_OfPlan]:
    """The parts of the plan called `plan` whose names are `given`, with commas between; all if that is empty.

    Raises:
        PlanError: no part has one of these names; the message calls it a `kind`, and names the option.
    """
    names = [name.strip() for name in given.split(",")] if given else [part.name for part in parts]
    known = [part.name for part in parts]
    if unknown := [name for name in names if name not in known]:
        raise PlanError(f"plan {plan!r} has no {kind} {unknown[0]!r}; --{option} takes {', '.join(known)}")
    return [part for part in parts if part.name in names]
