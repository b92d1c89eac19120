"""Audit an engine that this process holds: a `vllm.LLM`, in whatever processes it runs."""

from __future__ import annotations

import datetime
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_async_spec.audit.analysis import analyse
from vllm_async_spec.audit.folder import make_folder
from vllm_async_spec.audit.headline import headline, sentence
from vllm_async_spec.audit.recorded import load, ms, spread
from vllm_async_spec.audit.recording import DONE, How, Order
from vllm_async_spec.audit.report import EngineFacts, Load, Overhead, Report, Spread

RPC = "async_spec_audit"
"""The name by which `collective_rpc` reaches the audit's agents in an engine's processes."""
_LONGEST_S = 600
_QUIET = 1.03
"""Up to this ratio of step times, CUPTI's records do not distort what they show."""
SKIP = 8
"""Steps left out before a recording: prefills, and steps until the batch settles."""

Ask = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Sends a request to every process of an engine, and gives their answers: the engine core's first."""
Files = dict[str, Any]
"""Files saved by `worker`, and by `core` if that is another process (else None); JSON."""
Saved = dict[str, Files]
"""The files of each recording, by the value of its `How`."""


class AuditError(RuntimeError):
    """An audit can't be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of running a load once."""

    tokens: int
    seconds: float
    acceptance_length: float | None


def audit_llm(
    llm: Any,
    work: Callable[[], Ran],
    *,
    steps: int = 64,
    skip: int = SKIP,
    name: str = "your own",
    requests: int = 0,
    decided_by: str = "as the engine was made",
    rank: int = 0,
) -> Report:
    """Audit a `vllm.LLM` in a process with `VLLM_ASYNC_SPEC_AUDIT=1`.

    Args:
        llm: the engine.
        work: runs the load once and returns the result; called at least twice.
        steps: steps to record.
        skip: steps to leave out before them.
        name: what the report calls the load.
        requests: number of requests that run at once, for the report.
        decided_by: why asynchronous scheduling is as it is.
        rank: the worker to record, of several.

    Raises:
        AuditError: the engine's processes have no audit agent, it has no such rank, or the load has too few steps.
    """

    def ask(request: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            return answers(llm.collective_rpc(RPC, args=(json.dumps(request | {"rank": rank}),)))
        except Exception as error:
            if RPC not in str(error):
                raise
            raise AuditError(
                "this engine has no audit agent; start it with VLLM_ASYNC_SPEC_AUDIT=1 and vllm-async-spec installed"
            ) from error

    facts = described(ask({"do": "describe"}), rank)
    saved: Saved = {}
    with make_folder() as folder:
        for how in recordings(facts):
            ran = _record(ask, work, Order(how, skip, steps, folder))
            saved[how.value] = saved_files(ask({"do": "save"}))
        given = Load(name, requests, ran.tokens / ran.seconds, ran.acceptance_length)
        return make_report(engine_facts(facts, decided_by), saved, given)


def draft_counts(llm: Any) -> tuple[int, int]:
    """How often a `vllm.LLM` has drafted, and how many draft tokens it has accepted; zeros without speculation."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return 0, 0
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    drafts, accepted = (int(values.get(name, 0)) for name in names)
    return drafts, accepted


def answers(replies: list[str]) -> list[dict[str, Any]]:
    """The answers of an engine's agents, the engine core's first.

    Raises:
        AuditError: an agent answered with an error.
    """
    found = [json.loads(reply) for reply in replies]
    for answer in found:
        if "error" in answer:
            raise AuditError(answer["error"])
    return found


def described(found: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """What the engine runs with, and in which processes, from the answers to `describe` about this rank.

    Raises:
        AuditError: the engine has no such rank.
    """
    core, worker = found[0], next((answer for answer in found if "facts" in answer), None)
    if worker is None:
        last = max(answer["rank"] for answer in found[1:])
        raise AuditError(f"the engine has no rank {rank}; give --rank from 0 to {last}")
    how = {"_MainProcess": "the caller's", "ForkProcess": "forked", "SpawnProcess": "spawned"}
    if core["pid"] == worker["pid"]:
        processes = f"engine core and worker in one process ({how.get(worker['started_by'], worker['started_by'])})"
    else:
        processes = f"the worker in a process of its own ({how.get(worker['started_by'], worker['started_by'])})"
    facts: dict[str, Any] = worker["facts"]
    if facts.pop("world_size") > 1:
        processes += f"; only rank {rank} was recorded"
    return facts | {"processes": processes}


def most_seconds(seconds: float) -> float:
    """Time limit for the whole audit of a server, in seconds, by that of one recording."""
    return 4 * seconds + 60


def engine_facts(facts: dict[str, Any], decided_by: str) -> EngineFacts:
    """The facts of a report, of the worker's answer; `decided_by` tells of scheduling what the worker does not know."""
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
    return EngineFacts(**({"decided_by": decided_by} | values))


def recordings(facts: dict[str, Any]) -> tuple[How, ...]:
    """The recordings to make of an engine with these facts, in order; without a GPU none is by CUPTI alone."""
    return (How.PLAIN, How.DEVICE, How.FULL) if facts["driver"] else (How.PLAIN, How.FULL)


def saved_files(found: list[dict[str, Any]]) -> Files:
    """The files of the worker, and of the engine core where it recorded apart, from the answers to `save`."""
    worker = next(answer for answer in found if answer["role"] == "worker" and "files" in answer)
    return {"worker": worker["files"], "core": found[0].get("files")}


def make_report(facts: EngineFacts, saved: Saved, given: Load) -> Report:
    """A report of what the files of each recording hold.

    Raises:
        AuditError: too little was recorded.
    """
    try:
        full = load(saved[How.FULL.value]["worker"], saved[How.FULL.value]["core"])
        quiet = load(saved[How.DEVICE.value]["worker"]) if How.DEVICE.value in saved else None
    except ValueError as error:
        raise AuditError(str(error)) from error
    found = analyse(full, quiet)
    plain = _plain_steps(saved[How.PLAIN.value]["worker"])
    overhead = None if quiet is None else Overhead(plain, quiet.step_ms, full.step_ms)
    report = Report(
        headline=headline(facts, found),
        sentence=sentence(facts, found),
        engine=facts,
        load=given,
        steps=found.steps,
        step_ms=plain,
        overhead=overhead,
        simulated=found.simulated,
        causes=found.causes,
        phases=found.phases,
        gpu=found.gpu,
        timeline=found.timeline,
        notes=found.notes,
        command=command_line(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return replace(report, notes=(*report.notes, *_overstated(report)))


def _overstated(report: Report) -> Iterator[str]:
    """A note if recording itself lengthened steps and so left the device idle."""
    cost, idle = report.overhead, report.plain_idle
    if cost is not None and idle is not None and cost.device_ratio > _QUIET:
        yield (
            f"The GPU's own records made a step {cost.device_ratio:.2f} times as long, by host work, so the share "
            f"that the host leaves idle is overstated: without them it is about {idle:.1%}."
        )


def _plain_steps(files: dict[str, str]) -> Spread:
    steps = json.loads(Path(files["recording"]).read_text(encoding="utf-8"))["steps"]
    return spread([ms(b - a) for a, b in itertools.pairwise(steps)])


def command_line() -> str:
    """The command line of this process, quoted for a shell, with `KEY` in place of a server's API key."""
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for index, argument in enumerate(arguments):
        if argument.startswith("--api-key="):
            arguments[index] = "--api-key=KEY"
        elif index and arguments[index - 1] == "--api-key":
            arguments[index] = "KEY"
    return shlex.join(arguments)


def _record(ask: Ask, work: Callable[[], Ran], order: Order) -> Ran:
    """Give the engine work until it has gone through the steps of the order."""
    done = Path(order.folder) / DONE
    done.unlink(missing_ok=True)
    ask({"do": "arm", "how": order.how.value, "skip": order.skip, "steps": order.steps, "folder": order.folder})
    deadline = time.monotonic() + _LONGEST_S
    try:
        ran = work()
        while not done.exists():
            if time.monotonic() > deadline:
                raise AuditError(
                    f"the load did not run {order.skip} + {order.steps} steps in {_LONGEST_S} seconds; record fewer "
                    "steps"
                )
            ran = work()
    except BaseException:
        ask({"do": "cancel", "folder": order.folder})
        raise
    return ran


def main() -> None:
    """Analyse what a server recorded: a job on standard input, a report on standard output, both JSON."""
    job = json.load(sys.stdin)
    try:
        facts = engine_facts(job["facts"], "decided as the server was started")
        report = make_report(facts, job["saved"], Load("live traffic", 0, None, None))
    except AuditError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main()
