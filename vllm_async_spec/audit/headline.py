"""The headline of a report: is asynchronous scheduling on, on which engine, what blocks most, what to change."""

from __future__ import annotations

from vllm_async_spec.audit.analysis import Findings
from vllm_async_spec.audit.remedies import remedy
from vllm_async_spec.audit.report import EngineFacts, Phase, PhaseTime, Place

NOTHING_TO_WIN = 0.01
"""Share of host-caused idle below which removing waits is not worth the work."""


def headline(engine: EngineFacts, found: Findings) -> str:
    """The headline, one sentence.

    Args:
        engine: what ran.
        found: what its recording showed.
    """
    scheduling = f"Asynchronous scheduling is {'on' if engine.async_scheduling else 'off'} ({engine.decided_by})"
    where = f"{engine.runner} runner, {' and '.join(engine.backends) or 'no attention backend'}"
    return f"{scheduling}; {where}; {_finding(found)}; {_advice(engine, found)}."


def _finding(found: Findings) -> str:
    critical = [cause for cause in found.causes if cause.place is Place.CRITICAL]
    idle = "" if found.gpu is None else f" and the host leaves the GPU idle for {found.gpu.host_idle:.1%} of the time"
    if not critical:
        return f"nothing waits on the critical path{idle}"
    worst = critical[0]
    lost = "" if found.simulated else f", {sum(cause.ms_per_step for cause in critical):.2f} ms"
    count = sum(cause.per_step for cause in critical)
    what = "reads that would be waits on a GPU" if found.simulated else "waits"
    return f"{count:.2f} {what} a step on the critical path{lost}{idle}; most at {worst.site or 'an unknown place'}"


def _advice(engine: EngineFacts, found: Findings) -> str:
    critical = [cause for cause in found.causes if cause.place is Place.CRITICAL]
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
