"""What an audit found, as plain data: the only source of the terminal, the HTML page and the JSON file.

Times are host time; per-step figures are averages over the recorded steps. All classes are frozen dataclasses, which
`to_dict` and `from_dict` carry through JSON unchanged.
"""

from __future__ import annotations

import enum
import reprlib
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any

SCHEMA = 1
"""Increase it whenever a reader of older files would misunderstand a newer one."""


class WaitKind(str, enum.Enum):
    """How the host waited."""

    STREAM = "stream"
    """For a stream: `Stream.synchronize()`, or a library's `cudaStreamSynchronize`."""
    EVENT = "event"
    """For an event: `Event.synchronize()`."""
    DEVICE = "device"
    """For the whole device: `torch.cuda.synchronize()`."""
    COPY_TO_HOST = "copy to host"
    """A blocking copy from the device: `.cpu()`, `.to("cpu")`, `copy_` into a host tensor."""
    COPY_TO_DEVICE = "copy to device"
    """A blocking copy to the device: `.to(device)` without `non_blocking`, `torch.tensor(..., device=...)`."""
    PAGEABLE = "pageable copy"
    """A non-blocking copy that blocks all the same, because its host memory is not pinned."""
    READ = "read"
    """A value of a device tensor as a Python object or a shape: `.item()`, `.tolist()`, `nonzero`, a boolean index."""


class Place(str, enum.Enum):
    """What a wait delayed."""

    CRITICAL = "critical"
    """The thread that launches the forward waited until the device had nothing left to do."""
    OVERLAPPED = "overlapped"
    """The thread that launches the forward waited without loss: the device still had work afterwards, or the event had
    already happened."""
    HIDDEN = "hidden"
    """Another thread waited."""


class Phase(str, enum.Enum):
    """What the host does in a step."""

    SCHEDULING = "scheduling"
    INPUTS = "input preparation"
    METADATA = "metadata building"
    LAUNCH = "launch"
    SAMPLING = "sampling"
    DRAFTING = "drafting"
    OUTPUT = "output"
    AGREEMENT = "agreement of engines"
    """With data parallelism, on the size of the batch; waiting for the other engines is in it."""
    COLLECTION = "garbage collection"
    """Python's, whatever the thread did when it began."""
    OTHER = "other"
    """Inside a step, in none of the phases above."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a call stack."""

    file: str
    """Path from the package's name on, such as `vllm/v1/worker/gpu_model_runner.py`."""
    line: int
    function: str
    source: str = ""
    """The text of the line, or of the statement that it is in."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


_COPYING = ("seq_lens_cpu", "num_computed_tokens_cpu")


def asking(stack: Sequence[Frame]) -> Frame | None:
    """The frame that asked for the wait at a stack's innermost frame; None for an empty stack.

    Deprecated properties of vLLM's attention metadata copy from the device by themselves; then the frame that reads the
    property asked.
    """
    readers = (frame for frame in stack if frame.function.rpartition(".")[2] not in _COPYING)
    return next((frame for frame in readers if frame.file != "typing_extensions.py"), stack[0] if stack else None)


@dataclass(frozen=True, slots=True)
class Cause:
    """One place in the code that made the host wait, with all its waits."""

    kind: WaitKind
    place: Place
    thread: str
    """`worker` for the thread that launches the forward, else the thread's own name."""
    phase: Phase
    stack: tuple[Frame, ...]
    """Innermost first; empty if no Python call was seen, as for a thread of a library's own."""
    per_step: float
    """Waits a step."""
    ms_per_step: float
    """Milliseconds a step that the thread spent waiting; 0 in an audit on a CPU, where nothing can be timed."""
    longest_ms: float

    @property
    def site(self) -> Frame | None:
        """The line that asked for the wait."""
        return asking(self.stack)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Host time in one phase, without the time of other phases inside it."""

    phase: Phase
    thread: str
    ms_per_step: float
    waiting_ms_per_step: float
    """The part of `ms_per_step` that was spent waiting for the device."""
    longest_step_ms: float = 0.0
    """Milliseconds in the step that has most of it; far above `ms_per_step`, one stall makes the mean. 0 in older
    reports."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One stretch of time in which the device did nothing."""

    start_us: float
    """From the start of the recording."""
    us: float
    host: str
    """What the launching thread did meanwhile, longest first: `metadata building 62 %, waiting at FILE:LINE 20 %`."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """How the device spent the recording. The three shares add up to one."""

    busy: float
    """Share of the time in which at least one kernel or copy ran."""
    launch_gaps: float
    """Share in gaps under 3 microseconds, between kernels already launched. Fewer kernels reduce this share; fewer
    waits do not."""
    host_idle: float
    """Share in gaps of 3 microseconds and more, from the host or a dependency between streams."""
    kernels_per_step: float
    host_gaps_per_step: float
    gaps: tuple[Gap, ...]
    """The longest gaps, longest first."""


@dataclass(frozen=True, slots=True)
class Item:
    """One block of a lane of the timeline."""

    start_us: float
    us: float
    kind: str
    """A `Phase` on a host lane, or `wait`; on a device lane `kernels`, `copy` or `gap`."""
    label: str
    """What hovering shows first, such as `_prepare_inputs` or `214 kernels`."""
    where: str = ""
    """FILE:LINE in FUNCTION, where that is known."""
    critical: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """One host thread, or one stream of the device."""

    name: str
    device: bool
    items: tuple[Item, ...]
    """By start; items of a host lane nest (a wait inside a phase), items of a device lane do not overlap."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Some consecutive steps, from the middle of the recording."""

    us: float
    steps_us: tuple[float, ...]
    """Where each step starts."""
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample: its size, median, and the 10th and 90th percentile."""

    n: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """What recording cost: step times of the same load with and without it, in one engine."""

    plain_ms: Spread
    device_ms: Spread
    """With CUPTI's records only, the source of the device's time shares."""
    recorded_ms: Spread
    """With call stacks and phases too, the source of the causes, the phases, the gaps and the timeline."""

    @property
    def ratio(self) -> float:
        """Recorded over plain, of the medians."""
        return self.recorded_ms.median / self.plain_ms.median if self.plain_ms.median else float("nan")

    @property
    def device_ratio(self) -> float:
        """The same with CUPTI's records only."""
        return self.device_ms.median / self.plain_ms.median if self.plain_ms.median else float("nan")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine that ran."""

    vllm: str
    torch: str
    device: str
    """Such as `NVIDIA H200`, or `CPU`."""
    driver: str
    """Such as `driver 580.159, CUDA 13.0`; empty on a CPU."""
    python: str
    model: str
    runner: str
    """`V1` or `V2`."""
    backends: tuple[str, ...]
    """Attention backends of the target, such as `FLASH_ATTN`."""
    builders: tuple[str, ...]
    """The classes that build attention metadata."""
    async_scheduling: bool
    decided_by: str
    """Why asynchronous scheduling is on or off, in a clause."""
    speculation: str
    """Such as `eagle, K = 3`, or `none`."""
    graphs: str
    """vLLM's CUDA graph mode, or `none`."""
    plugin: str
    """Such as `on: 5 patches applied, 4 not needed`, or `off`."""
    processes: str
    """Such as `engine core and worker in one process` or `worker in its own process (fork)`."""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load."""

    name: str
    requests: int
    """Requests that ran at once, at most."""
    tokens_per_second: float | None
    acceptance_length: float | None
    """Mean tokens a step and request, the target's own included; None without speculation."""


@dataclass(frozen=True, slots=True)
class Report:
    """One audit."""

    headline: str
    """The verdict, in at most twelve words."""
    engine: EngineFacts
    load: Load
    steps: int
    step_ms: Spread
    overhead: Overhead | None
    simulated: bool
    """True on a CPU: waits are reads that would wait on a GPU, without times, and there is no device time."""
    causes: tuple[Cause, ...]
    """Critical first, then by time, then by number."""
    phases: tuple[PhaseTime, ...]
    """In the order of a step."""
    gpu: DeviceTime | None
    timeline: Timeline | None
    notes: tuple[str, ...]
    """What a reader must know to trust the figures: what was not seen, what was cut."""
    command: str
    date: str
    schema: int = SCHEMA
    sentence: str = ""
    """Where the host waits most, and what to change; empty in older reports, whose headline says all."""

    def waits(self, place: Place) -> float:
        """Waits a step in one place."""
        return sum(cause.per_step for cause in self.causes if cause.place is place)

    def waiting_ms(self, place: Place) -> float:
        """Milliseconds of waiting a step in one place."""
        return sum(cause.ms_per_step for cause in self.causes if cause.place is place)

    @property
    def plain_idle(self) -> float | None:
        """Share of host-caused idle without recording, accurate to 0.01 or 0.02.

        Recording lengthens steps, but neither device work nor gaps within graphs. None where either was not measured.
        """
        if self.gpu is None or self.overhead is None:
            return None
        return max(1 - (self.gpu.busy + self.gpu.launch_gaps) * max(self.overhead.device_ratio, 1), 0)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report from the data of `to_dict`.

        Raises:
            ValueError: the data is not a report, or one of another schema; the message says which.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(
                f"this is not an audit report of schema {SCHEMA} (its schema is {schema!r}); "
                "make a new report with `vllm-async-spec audit --json`"
            )
        report: Report = _value(cls, data, "report")
        return report


def _value(hint: Any, value: Any, name: str) -> Any:
    """The value of type `hint` that a field had before JSON; `name` is the field, for the error message."""
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(typing.get_args(hint)[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return None if value is None else _value(inner, value, name)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        needed = {field.name for field in fields(hint) if field.default is MISSING}
        if missing := needed - value.keys():
            raise ValueError(f"this audit report is incomplete: {name} lacks {', '.join(sorted(missing))}")
        given = {field: of for field, of in hints.items() if field in value}
        return hint(**{field: _value(of, value[field], f"{name}.{field}") for field, of in given.items()})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        choices = [member.value for member in hint]
        if value in choices:
            return hint(value)
        raise ValueError(f"this is not an audit report: {name} is {value!r}; it must be one of {', '.join(choices)}")
    if isinstance(hint, type) and isinstance(value, (int, float) if hint is float else hint):
        return value
    raise ValueError(
        f"this is not an audit report: {name} is {reprlib.repr(value)}; it must be of type {hint.__name__}"
    )
