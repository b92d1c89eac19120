"""What a check found, as plain data: the source of the table, the JSON and the JUnit file."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.compare import Difference, Judgement
from vllm_async_spec.compat.device import Wait

__all__ = ["TOLERANCE", "Attended", "BackendResult", "Build", "CaseResult", "Need"]

TOLERANCE = 0.02
"""Greatest allowed |output - reference| / (1 + |reference|), for bfloat16 output and a float32 reference.

bfloat16 has 8 significant bits, so rounding changes keys, weights and output by up to 0.004 of their value. Rejected
and free slots of the KV cache hold 1000, so attending to one of them among 8192 keys exceeds the tolerance.
"""


class Need(enum.IntEnum):
    """The least that the host must know for a builder to be right without a wait; a greater value is worse."""

    NONE = 0
    """Nothing: device lengths and the scalar `max_seq_len`."""
    PREFILL_ROWS = 1
    """Lengths of prefills, which the host knows anyway; host lengths of decodes do not matter."""
    UPPER_BOUND = 2
    """An upper bound of each row's length."""
    EXACT = 3
    """Exact lengths of decodes."""
    BLOCKING = 4
    """The builder waits whatever the host knows."""

    def __str__(self) -> str:
        return {1: "prefill rows", 2: "upper bound", 4: "blocks"}.get(self, self.name.lower())


@dataclass(frozen=True, slots=True)
class Build:
    """One build of one batch.

    Attributes:
        host: What the host was told.
        failure: The exception and where it was raised; None if the build finished.
        waits: Where the host would wait, in the order of time.
        changed: Fields of the common metadata that the builder changed in place.
        differences: Fields that differ from the build with exact host lengths.
        not_validated: Fields that depend on kernels that did not run; they have not been judged.
        skipped: Fields that can't be compared, such as functions.
    """

    host: Host
    failure: str | None = None
    waits: tuple[Wait, ...] = ()
    changed: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    not_validated: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """Differences judged wrong."""
        return tuple(each for each in self.differences if each.judgement is Judgement.WRONG)

    @property
    def serves(self) -> bool:
        """Whether it finished without a wait, and nothing in the result is wrong."""
        return self.failure is None and not self.waits and not self.wrong

    @property
    def equal(self) -> bool:
        """Whether it finished, and the result equals the exact one in all fields compared."""
        return self.failure is None and not self.differences

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything wrong with the build, in a sentence each."""
        told = f"told {self.host.value}"
        found = [f"{told}, it waits: {wait}" for wait in dict.fromkeys(map(str, self.waits))]
        if self.failure is not None:
            found.append(f"{told}, it fails: {self.failure}")
        found += [f"{told}, {difference}" for difference in self.wrong]
        found += [f"{told}, it changes {name} of the common metadata in place" for name in self.changed]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over one batch, with metadata that was built for it.

    Attributes:
        host: What the host was told for the build.
        not_run: Why attention did not run; None if it ran.
        waits: Where the host would wait in the layer's forward, in the order of time.
        difference: Greatest |output - reference| / (1 + |reference|) over all real tokens; NaN if an output is NaN.
            None if attention did not run.
    """

    host: Host
    not_run: str | None = None
    waits: tuple[Wait, ...] = ()
    difference: float | None = None

    @property
    def right(self) -> bool | None:
        """Whether all outputs are within `TOLERANCE`; None if attention did not run."""
        return None if self.difference is None else self.difference <= TOLERANCE

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything wrong with the attention, in a sentence each."""
        told = f"told {self.host.value}"
        found = [f"{told}, in its forward it waits: {wait}" for wait in dict.fromkeys(map(str, self.waits))]
        if self.right is False:
            found.append(f"{told}, attention is wrong: it differs by up to {self.difference:.2g}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One batch under everything that the host may be told.

    Attributes:
        case: The batch's name.
        not_run: Why the batch was not judged: it does not apply to the builder, or fails even with exact lengths.
        realistic: What the host knows without waiting, in an engine with asynchronous speculative decoding.
        need: Class of need, from the builds and, where attention ran, from attention. None if the batch did not run.
        builds: One for each `Host` that was tried.
        unsteady: Fields that differ between two builds with exact lengths, and so were not judged.
        capture: Whether the build records a CUDA graph at start-up rather than serves a step.
        attended: Attention with the builds, one for each `Host` that was tried; empty if attention was not tried.
        model: The model whose numbers the builder had; empty if the builder asks for none.
    """

    case: str
    not_run: str | None
    realistic: Host
    capture: bool = False
    need: Need | None = None
    builds: tuple[Build, ...] = ()
    unsteady: tuple[str, ...] = ()
    attended: tuple[Attended, ...] = ()
    model: str = ""

    def build(self, host: Host) -> Build | None:
        """The build under `host`, if there was one."""
        return next((build for build in self.builds if build.host is host), None)

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults in an engine with asynchronous speculative decoding."""
        build = self.build(self.realistic)
        attended = [fault for each in self.attended if each.host is self.realistic for fault in each.faults]
        return () if build is None else (*build.faults, *attended)

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings that are no fault in such an engine, but may be one elsewhere."""
        found = []
        if self.need is Need.NONE and self._goes_by(Host.GARBAGE):
            found.append("needs no host lengths, but uses them where they are given")
        elif self.need in (Need.PREFILL_ROWS, Need.UPPER_BOUND) and self._goes_by(Host.STALE):
            found.append("needs the upper bound only, but uses host lengths where they are given")
        found += [fault for each in self.attended if each.host is not self.realistic for fault in each.faults]
        return tuple(found)

    def _goes_by(self, garbage: Host) -> bool:
        """Whether garbage in host lengths that the builder does not need shows in the build or in attention."""
        build = self.build(garbage)
        wrong = any(each.host is garbage and each.right is False for each in self.attended)
        return wrong or (build is not None and not build.serves)

    @property
    def was_attended(self) -> bool:
        """Whether attention ran with what an engine with asynchronous speculative decoding knows."""
        return any(each.host is self.realistic and each.not_run is None for each in self.attended)


@dataclass(frozen=True, slots=True)
class BackendResult:
    """The results of one builder.

    Attributes:
        backend: Its name.
        builder: `module:class` of the builder; the name asked for if none was made.
        metadata: Where its common metadata comes from: `vLLM 0.32.0`, or `vllm-async-spec`.
        patched: Whether the plugin's patches were applied.
        device: `cpu`, where device memory is simulated, or the GPU's name.
        failure: Why there is no builder; None if there is one.
        cases: All batches with the first model, in the order of `cases.CASES`, then with the next one.
        not_attended: Why attention ran with none of its builds; None if it ran.
        model: The first model whose numbers the builder had; empty if the builder asks for none.
    """

    backend: str
    builder: str
    metadata: str
    patched: bool
    device: str
    failure: str | None = None
    cases: tuple[CaseResult, ...] = ()
    not_attended: str | None = "attention was not tried"
    model: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose numbers the builder was tried with; empty if it asks for none."""
        return tuple(dict.fromkeys(case.model for case in self.ran if case.model))

    def joined(self, others: Sequence[BackendResult]) -> BackendResult:
        """This result, with the batches of further models; a model without a builder is a batch that did not run."""
        found = [*self.cases]
        for other in others:
            unmade = CaseResult("construction", other.failure, Host.EXACT, model=other.model)
            found += other.cases if other.failure is None else (unmade,)
        return replace(self, cases=tuple(found))

    def label(self, case: CaseResult) -> str:
        """The batch's name, with the model if the builder was tried with several."""
        return f"{case.case}, {case.model}" if len(self.models) > 1 else case.case

    @property
    def ran(self) -> tuple[CaseResult, ...]:
        """The batches that ran."""
        return tuple(case for case in self.cases if case.need is not None)

    @property
    def steps(self) -> tuple[CaseResult, ...]:
        """The batches that ran and are built in a step."""
        return tuple(case for case in self.ran if not case.capture)

    @property
    def need(self) -> Need | None:
        """The worst need of all batches of steps; None if none ran."""
        return max((case.need for case in self.steps if case.need is not None), default=None)

    @property
    def verdict(self) -> str:
        """The need in a word or two, or `not constructed`, or `not run`."""
        if self.failure is not None:
            return "not constructed"
        return "not run" if self.need is None else str(self.need)

    @property
    def faults(self) -> dict[str, tuple[str, ...]]:
        """Faults in a step of an engine with asynchronous speculative decoding, by batch."""
        return {self.label(case): case.faults for case in self.steps if case.faults}

    @property
    def at_capture(self) -> dict[str, tuple[str, ...]]:
        """Faults while a CUDA graph is recorded, which delays no step, by batch."""
        return {self.label(case): case.faults for case in self.ran if case.capture and case.faults}

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Waits in the steps of such an engine, each place once."""
        builds = [case.build(case.realistic) for case in self.steps]
        found = {str(wait): wait for build in builds if build is not None for wait in build.waits}
        return tuple(found.values())

    @property
    def not_validated(self) -> tuple[str, ...]:
        """Fields that depend on kernels that did not run, of all batches."""
        return tuple(sorted({path for case in self.ran for build in case.builds for path in build.not_validated}))

    @property
    def passed(self) -> bool:
        """Whether some batch of a step ran, and none has a fault in such an engine."""
        return bool(self.steps) and not self.faults

    def explain(self) -> str:
        """The faults, a line each; or why there are none."""
        if self.failure is not None:
            return f"{self.backend}: {self.failure}"
        if not self.steps:
            reasons = (case.not_run for case in self.cases if case.not_run)
            return f"{self.backend}: no batch ran; {next(reasons, 'there are no batches')}"
        lines = [f"{case}: {fault}" for case, faults in self.faults.items() for fault in faults]
        return "\n".join(lines) or f"{self.backend}: {len(self.steps)} batches ran, and none waits for the device"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON; all evidence is in it."""
        return {
            "backend": self.backend,
            "builder": self.builder,
            "metadata": self.metadata,
            "patched": self.patched,
            "device": self.device,
            "failure": self.failure,
            "verdict": self.verdict,
            "passed": self.passed,
            "not_validated": list(self.not_validated),
            "not_attended": self.not_attended,
            "models": list(self.models),
            "cases": [_case(case) for case in self.cases],
        }


def _case(case: CaseResult) -> dict[str, Any]:
    return {
        "case": case.case,
        "model": case.model,
        "capture": case.capture,
        "not_run": case.not_run,
        "need": None if case.need is None else str(case.need),
        "faults": list(case.faults),
        "notes": list(case.notes),
        "unsteady": list(case.unsteady),
        "builds": [_build(build, build.host is case.realistic) for build in case.builds],
        "attended": [_attended(each, each.host is case.realistic) for each in case.attended],
    }


def _attended(attended: Attended, realistic: bool) -> dict[str, Any]:
    return {
        "host": attended.host.value,
        "realistic": realistic,
        "not_run": attended.not_run,
        "waits": _waits(attended.waits),
        # JSON has no NaN.
        "difference": None if attended.difference is None else str(attended.difference),
        "right": attended.right,
    }


def _build(build: Build, realistic: bool) -> dict[str, Any]:
    return {
        "host": build.host.value,
        "realistic": realistic,
        "failure": build.failure,
        "waits": _waits(build.waits),
        "changed": list(build.changed),
        "differences": [
            {"field": d.field, "judgement": d.judgement.value, "exact": d.exact, "found": d.found}
            for d in build.differences
        ],
        "equal": build.equal,
        "not_validated": list(build.not_validated),
        "skipped": list(build.skipped),
    }


def _waits(waits: tuple[Wait, ...]) -> list[dict[str, Any]]:
    return [
        {
            "kind": wait.kind.value,
            "what": wait.what,
            "stack": [f"{f.file}:{f.line} in {f.function}: {f.source}" for f in wait.stack],
        }
        for wait in waits
    ]
