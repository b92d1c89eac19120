"""What a check found: the source of the table, the JSON and the JUnit file."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from vllm_async_spec.compat.advice import advised
from vllm_async_spec.compat.branches.reached import Reached, Unreached
from vllm_async_spec.compat.build_result import Build, differences_data, waits_data
from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.compare import Difference
from vllm_async_spec.compat.device import Wait

NOT_SHOWN_CLEAN = "not shown clean"
"""Said of a builder without a fault, if no batch reached a line that could wait."""

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
class Attended:
    """Attention over one batch, with metadata that was built for it.

    Attributes:
        host: What the host was told for the build.
        not_run: Why attention did not run; None if it ran.
        failure: What the forward raises and where; None if it finished or did not run.
        out_of_time: Whether it did not run because the time for this builder's forwards was over.
        waits: Where the host would wait in the layer's forward, in the order of time.
        difference: Greatest |output - reference| / (1 + |reference|) over all real tokens; NaN if an output is NaN.
            None if attention did not run.
    """

    host: Host
    not_run: str | None = None
    waits: tuple[Wait, ...] = ()
    difference: float | None = None
    failure: str | None = None
    out_of_time: bool = False

    @property
    def right(self) -> bool | None:
        """Whether all outputs are within `TOLERANCE`; None if attention did not run."""
        return None if self.difference is None else self.difference <= TOLERANCE

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything wrong with the attention, in a sentence each."""
        told = f"told {self.host.value}"
        found = [f"{told}, in its forward it waits: {wait}" for wait in dict.fromkeys(map(str, self.waits))]
        if self.failure is not None:
            found.append(f"{told}, its forward fails: {self.failure}")
        if self.right is False:
            found.append(f"{told}, attention is wrong: it differs by up to {self.difference:.2g}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One batch under everything that the host may be told.

    Attributes:
        not_run: Why the batch was not judged: a declaration of the builder excludes the batch, or it does not apply.
        realistic: What the host knows without waiting, in an engine with asynchronous speculative decoding.
        need: Class of need, from the builds and, where attention ran, from attention. None if the batch did not run.
        declared: What an adapter declares to need, with `host_need`; None if it declares nothing.
        builds: One for each `Host` that was tried.
        unsteady: Fields that differ between two builds with exact lengths, and so were not judged.
        capture: Whether the build records a CUDA graph at start-up rather than serves a step.
        attended: Attention with the builds, one for each `Host` that was tried; empty if attention was not tried.
        failure: What the builder raises even with exact lengths, and where; None if it builds the batch.
        unpadded: The declaration by which the batch was given without padding rows, because with them it fails.
        against_model: Fields of vLLM's names that are wrong even with exact lengths.
        in_turn: The build after other batches by one builder, with what it does only then.
        model: The model whose numbers the builder had; empty if the builder asks for none.
    """

    case: str
    not_run: str | None
    realistic: Host
    capture: bool = False
    need: Need | None = None
    declared: Need | None = None
    builds: tuple[Build, ...] = ()
    unsteady: tuple[str, ...] = ()
    attended: tuple[Attended, ...] = ()
    failure: str | None = None
    unpadded: str | None = None
    against_model: tuple[Difference, ...] = ()
    in_turn: Build | None = None
    model: str = ""

    def build(self, host: Host) -> Build | None:
        """The build under `host`, if there was one."""
        return next((build for build in self.builds if build.host is host), None)

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults in an engine with asynchronous speculative decoding."""
        if self.failure is not None:
            return (f"told {Host.EXACT.value}, it fails: {self.failure}",)
        build = self.build(self.realistic)
        if build is None:
            return ()
        realistic = [each for each in self.attended if each.host is self.realistic]
        found = [*build.faults, *(fault for each in realistic for fault in each.faults)]
        if not self.attended_right:
            found += [f"told {Host.EXACT.value}, {d} against the batch in plain Python" for d in self.against_model]
        found += [] if self.in_turn is None else [f"after other batches, {fault}" for fault in self.in_turn.faults]
        if not any(each.failure for each in realistic):
            exact = (each for each in self.attended if each.host is Host.EXACT and each.failure)
            found += [fault for each in exact for fault in each.faults]
        if self.need is not None and self.declared is not None and self.need > self.declared:
            found.append(f"its host_need declares {self.declared}, and it needs more: {self.need}")
        return tuple(found)

    @property
    def failed(self) -> bool:
        """Whether the builder or the forward raises in an engine, with this batch."""
        told = (Host.EXACT, self.realistic)
        return self.failure is not None or any(each.failure and each.host in told for each in self.attended)

    @property
    def attended_right(self) -> bool:
        """Whether attention with exact lengths is right, so that no field of the metadata can be wrong."""
        return any(each.host is Host.EXACT and each.right for each in self.attended)

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings that are no fault in such an engine, but may be one elsewhere."""
        found = []
        if self.need is Need.NONE and self._goes_by(Host.GARBAGE):
            found.append("needs no host lengths, but uses them where they are given")
        elif self.need in (Need.PREFILL_ROWS, Need.UPPER_BOUND) and self._goes_by(Host.STALE):
            found.append("needs the upper bound only, but uses host lengths where they are given")
        others = [each for each in self.attended if each.host is not self.realistic]
        found += [fault for each in others for fault in each.faults if fault not in self.faults]
        return tuple(found)

    def _goes_by(self, garbage: Host) -> bool:
        """Whether garbage in host lengths that the builder does not need shows in the build or in attention."""
        build = self.build(garbage)
        wrong = any(each.host is garbage and each.right is False for each in self.attended)
        return wrong or (build is not None and not build.serves)

    @property
    def was_attended(self) -> bool:
        """Whether attention ran with what an engine with asynchronous speculative decoding knows."""
        return any(each.host is self.realistic and each.difference is not None for each in self.attended)


@dataclass(frozen=True, slots=True)
class BackendResult:
    """The results of one builder, `backend`.

    Attributes:
        builder: `module:class` of the builder; the name asked for if none was made.
        metadata: Where its common metadata comes from: `vLLM 0.32.0`, or `vllm-async-spec`.
        patched: Whether the plugin's patches were applied.
        device: `cpu`, where device memory is simulated, or the GPU's name.
        failure: Why there is no builder; None if there is one.
        cases: All batches with the first model, in the order of `cases.CASES`, then with the next one.
        not_attended: Why attention ran with none of its builds; None if it ran.
        unfinished: What was left out though it could have run, and why; None if nothing was.
        model: The first model whose numbers the builder had; empty if the builder asks for none.
        reached: Lines and branches that the batches reached, with all models; None if not all batches were tried.
    """

    backend: str
    builder: str
    metadata: str
    patched: bool
    device: str
    failure: str | None = None
    cases: tuple[CaseResult, ...] = ()
    not_attended: str | None = "attention was not tried"
    unfinished: str | None = None
    model: str = ""
    reached: Reached | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose numbers the builder was tried with; empty if it asks for none."""
        return tuple(dict.fromkeys(case.model for case in self.cases if case.model and case.not_run is None))

    def joined(self, other: BackendResult) -> BackendResult:
        """This result, with the batches of another model; a model without a builder is a batch that did not run."""
        unmade = CaseResult("construction", other.failure, Host.EXACT, model=other.model)
        cases = self.cases + (other.cases if other.failure is None else (unmade,))
        return replace(self, cases=cases, reached=other.reached or self.reached)

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
    def failed(self) -> tuple[CaseResult, ...]:
        """The batches with which the builder or the forward raises in an engine, those for CUDA graphs included."""
        return tuple(case for case in self.cases if case.failed)

    @property
    def verdict(self) -> str:
        """The need in a word or two, or `fails`, `not constructed`, or `not run`."""
        if self.failure is not None:
            return "not constructed"
        if self.failed:
            return "fails"
        return "not run" if self.need is None else str(self.need)

    @property
    def faults(self) -> dict[str, tuple[str, ...]]:
        """Faults in a step of an engine with asynchronous speculative decoding, by batch; and all that raises."""
        told = (case for case in self.cases if case.faults and (case.failed or not case.capture))
        return {self.label(case): case.faults for case in told}

    @property
    def at_capture(self) -> dict[str, tuple[str, ...]]:
        """Faults while a CUDA graph is recorded, which delays no step, by batch."""
        told = (case for case in self.ran if case.capture and case.faults and not case.failed)
        return {self.label(case): case.faults for case in told}

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
        """Whether some batch of a step ran, none has a fault in such an engine, and nothing was left out."""
        return bool(self.steps) and not self.faults and self.unfinished is None

    @property
    def unreached(self) -> tuple[Unreached, ...]:
        """Lines of the builder, and of what it calls, that could wait and that no batch reached."""
        return () if self.reached is None else self.reached.unreached

    @property
    def shown_clean(self) -> bool:
        """Whether it passed, and the batches reached every line that could wait."""
        return self.passed and not self.unreached

    @property
    def untried(self) -> bool:
        """Whether the builder can't be judged: it was not made, no batch ran, or something was left out."""
        return not self.faults and (not self.steps or self.unfinished is not None)

    def explain(self) -> str:
        """The faults, a line each; or why there are none."""
        if self.failure is not None:
            return f"{self.backend}: {self.failure}"
        if not self.steps and not self.faults:
            reasons = (case.not_run for case in self.cases if case.not_run)
            return f"{self.backend}: no batch ran; {advised(next(reasons, 'there are no batches'))}"
        lines = [f"{case}: {advised(fault)}" for case, faults in self.faults.items() for fault in faults]
        lines += [] if self.unfinished is None else [f"{self.backend}: {self.unfinished}"]
        if lines:
            return "\n".join(lines)
        clean = f"{self.backend}: {len(self.steps)} batches ran, and none waits for the device"
        missed = [f"{self.backend}: {NOT_SHOWN_CLEAN}, no batch reached {each}" for each in self.unreached]
        return "\n".join([clean, *missed])

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
            "unfinished": self.unfinished,
            "shown_clean": self.shown_clean,
            "reached": None if self.reached is None else self.reached.to_dict(),
            "cases": [_case(case) for case in self.cases],
        }


def _case(case: CaseResult) -> dict[str, Any]:
    return {
        "case": case.case,
        "model": case.model,
        "capture": case.capture,
        "not_run": case.not_run,
        "failure": case.failure,
        "failed": case.failed,
        "unpadded": case.unpadded,
        "need": None if case.need is None else str(case.need),
        "faults": list(case.faults),
        "notes": list(case.notes),
        "unsteady": list(case.unsteady),
        "builds": [build.to_dict(build.host is case.realistic) for build in case.builds],
        "attended": [_attended(each, each.host is case.realistic) for each in case.attended],
        "against_model": [] if case.attended_right else differences_data(case.against_model),
        "in_turn": None if case.in_turn is None else case.in_turn.to_dict(True),
        "wrong_in_turn": case.in_turn is not None and bool(case.in_turn.faults),
    }


def _attended(attended: Attended, realistic: bool) -> dict[str, Any]:
    return {
        "host": attended.host.value,
        "realistic": realistic,
        "not_run": attended.not_run,
        "failure": attended.failure,
        "waits": waits_data(attended.waits),
        # JSON has no NaN.
        "difference": None if attended.difference is None else str(attended.difference),
        "right": attended.right,
    }
