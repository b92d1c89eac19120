"""The headline of a report, and the sentence below: does the host wait, where most, and what to change."""

from __future__ import annotations

from vllm_async_spec.audit.analysis import Findings
from vllm_async_spec.audit.remedies import remedy
from vllm_async_spec.audit.report import Cause, EngineFacts, Phase, PhaseTime, Place

NOTHING_TO_WIN = 0.01
"""Share of host-caused idle below which removing waits is not worth the work."""


def headline(engine: EngineFacts, found: Findings) -> str:
    """The verdict on the engine that ran, by what its recording showed, in at most twelve words."""
    waits = bool(_critical(found))
    if not engine.async_scheduling:
        reads = "; on a GPU the host would also wait" if found.simulated else "; the host also waits for the GPU"
        return f"Asynchronous scheduling is off{reads if waits else ''}"
    if waits:
        return f"{'On a GPU the host would wait' if found.simulated else 'The host waits'} on the critical path"
    if found.gpu is not None and found.gpu.host_idle >= NOTHING_TO_WIN:
        return "Nothing waits, but host work leaves the GPU idle"
    return "Nothing waits on the critical path"


def sentence(engine: EngineFacts, found: Findings) -> str:
    """Where the host waits most, and what to change: the sentence below the headline, with the same arguments."""
    critical = _critical(found)
    most = f"most waits are at {critical[0].site or 'an unknown place'}; " if critical else ""
    said = f"{most}{_advice(engine, found)}."
    return said[0].upper() + said[1:]


def _critical(found: Findings) -> list[Cause]:
    return [cause for cause in found.causes if cause.place is Place.CRITICAL]


def _advice(engine: EngineFacts, found: Findings) -> str:
    critical = _critical(found)
    if not engine.async_scheduling:
        return "turn asynchronous scheduling on: `vllm-async-spec status` shows why it is off"
    slowest = max((p for p in found.phases if p.thread == "worker"), key=lambda p: p.ms_per_step, default=None)
    if critical:
        lost = sum(cause.ms_per_step for cause in critical)
        beside = "" if slowest is None or slowest.ms_per_step < 5 * lost else _beside(slowest)
        return f"to change: {remedy(critical[0].kind)}{beside}"
    if found.gpu is None:
        return "there is nothing to change"
    if found.gpu.host_idle < NOTHING_TO_WIN or slowest is None:
        return "there is nothing to win by removing waits"
    return f"the idle time is host work, not waits: {slowest.phase.value} takes most of it"


def _beside(slowest: PhaseTime) -> str:
    """A clause on a phase so long that removing waits alone can't help."""
    why = ", as it does where the forward runs without a CUDA graph" if slowest.phase is Phase.LAUNCH else ""
    return f"; beside the waits, {slowest.phase.value} takes {slowest.ms_per_step:.1f} ms of the host a step{why}"
