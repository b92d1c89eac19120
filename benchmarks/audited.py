"""What a result keeps of an audit: shares of the time, and the code that waits."""

from typing import Any

from vllm_async_spec.audit.report import Place, Report, WaitKind

AUDIT_STEPS = 32
_WORKER = "worker"
"""What a report calls the thread that launches the forward."""
_RANK = ", rank "


def of_rank(load: str, rank: int) -> str:
    """What a result calls the audit of a rank under a load; that of rank 0 has the name of the load."""
    return f"{load}{_RANK}{rank}" if rank else load


def load_and_rank(audit: str) -> tuple[str, int]:
    """The load and the rank of an audit, of what a result calls it."""
    load, _, rank = audit.partition(_RANK)
    return load, int(rank or 0)


def digest(report: Report) -> dict[str, Any]:
    """The values of an audit for a row of a table. The whole report is twenty times as long."""
    critical = [cause for cause in report.causes if cause.place is Place.CRITICAL]
    return {
        "host_idle": report.gpu and report.gpu.host_idle,
        "plain_idle": report.plain_idle,
        "critical": [report.waits(Place.CRITICAL), report.waiting_ms(Place.CRITICAL)],
        "sites": [[_short(str(cause.site)), cause.kind.value, cause.per_step] for cause in critical],
        "overlapped": [report.waits(Place.OVERLAPPED), report.waiting_ms(Place.OVERLAPPED)],
    }


def host_time(report: Report) -> dict[str, Any]:
    """Milliseconds of a step without recording, and what takes the time of the thread that launches the forward.

    `phases` has the milliseconds a step by phase, waiting left out; `stalls` the milliseconds of one step that has more
    than half of all time in a phase; and `pageable` the copies of memory that is not pinned, wherever they wait: site,
    number a step, milliseconds a step. All are while recorded.
    """
    cost, worker = report.overhead, [phase for phase in report.phases if phase.thread == _WORKER]
    pageable = [cause for cause in report.causes if cause.kind is WaitKind.PAGEABLE]
    return {
        "step_ms": cost and cost.plain_ms.median,
        "phases": {each.phase.value: each.ms_per_step - each.waiting_ms_per_step for each in worker},
        "stalls": {
            each.phase.value: each.longest_step_ms
            for each in worker
            if each.longest_step_ms > each.ms_per_step * report.steps / 2
        },
        "waiting_ms": sum(each.waiting_ms_per_step for each in worker),
        "pageable": [[_short(str(cause.site)), cause.per_step, cause.ms_per_step] for cause in pageable],
    }


def _short(site: str) -> str:
    """A site without the directories that every site of vLLM has."""
    return site.removeprefix("vllm/v1/").replace("attention/backends/", "")
