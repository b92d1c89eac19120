"""Runs a served plan: starts the servers, drives one at a time, and writes the result after every step."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm
from benchmarks.audited import digest, host_time
from benchmarks.child import ChildError
from benchmarks.machine import gpus, has_gpu, installed_vllm, too_few_gpus
from benchmarks.serving.arguments import client_arguments, load_arguments, sample_arguments
from benchmarks.serving.client import requests_of
from benchmarks.serving.plan import ServePlan, Step, steps
from benchmarks.serving.requests import write_requests, write_sample
from benchmarks.serving.results import ServeFile
from benchmarks.serving.servers import Processes, Server
from benchmarks.shapes import find_shape
from vllm_async_spec.audit.engine import AuditError
from vllm_async_spec.audit.launch import audit_server
from vllm_async_spec.audit.loads import LoadError

Report = Callable[[str], None]
_WARM_UP, _WARM_UP_OUTPUT = 64, 8
"""Requests that a new server gets before anything is measured, and the output tokens of each."""
_AT_ONCE = 32
"""Sampled requests, and requests of the warm-up, that run at once."""
_SLOWER, _SPARE_S = 5.0, 60.0
"""A load may last so many times as long as it should, and so many seconds more; then the client is ended."""
_AUDIT_S = 60.0
"""Expected seconds of an audit with the start of its server, and the limit of each of its recordings."""
_DRAIN_S = 3.0
"""Expected seconds of a load after its last request has arrived."""


class ServeRunner:
    """Runs the steps of a plan that its result file does not hold yet."""

    def __init__(
        self,
        plan: ServePlan,
        result: ServeFile,
        *,
        command: str,
        envs: Mapping[str, Path],
        cache: Path,
        report: Report = lambda line: None,
    ) -> None:
        """Prepare to run `plan`; the arguments are those of `runner.Runner`."""
        self._plan, self._result, self._command, self._report = plan, result, command, report
        self._envs, self._cache = envs, cache
        self._longest: dict[str, float] = {}
        self._dead: set[str] = set()
        self._until = float("inf")

    def missing(self, *, only: str = "", loads: str = "", retry: bool = False) -> list[Step]:
        """The steps that `run` would run."""
        arms, chosen = self._plan.named(only), [None, *self._plan.chosen(loads)]
        asked = [step for step in steps(self._plan) if step.arm in arms and step.load in chosen]
        beside = {arm.name for arm in arms} & {self._plan.reference, self._plan.control}
        lacking = [step for step in asked if not self._result.holds(step, beside, failed=not retry)]
        again = {(step.load, step.number) for step in lacking if step.load and not step.audits}
        return [
            step for step in asked if step in lacking or (step.arm.name in beside and (step.load, step.number) in again)
        ]

    def lacks(self, arms: Iterable[Arm]) -> str | None:
        """Why this machine can't run these arms, with the remedy; None if it can."""
        arms = list(arms)
        if all(arm.needs_gpu for arm in arms) and not has_gpu():
            return "its servers need a GPU, and this machine has none; run it where there is one, or take serve-tiny"
        here = installed_vllm()
        without = sorted({arm.release for arm in arms if arm.release and arm.release not in (*self._envs, here)})
        if without:
            return f"no environment has vLLM {', '.join(without)}; give --env RELEASE=FILE"
        if here is None and any(arm.release is None for arm in arms):
            return "vLLM is not installed in this environment; install it, or take a plan that names a release"
        found, wanted = gpus(), max(arm.gpus for arm in arms)
        needs = [arm.gpu_bytes for arm in arms if arm.needs_gpu]
        needed = (sum(needs) if self._plan.keep else max(needs)) if needs else 0
        few = too_few_gpus(found, wanted)
        if few:
            return f"each of its servers {few}"
        room = max(found, default=needed)
        if needed <= room:
            return None
        return (
            f"{len(needs)} servers side by side need about {needed / 1e9:.0f} GB, and the GPU has "
            f"{room / 1e9:.0f} GB; give --one-by-one, or --only with fewer arms, or run it on a larger GPU"
        )

    def run(self, *, only: str = "", loads: str = "", budget: float = float("inf"), retry: bool = False) -> bool:
        """Run the missing steps, and return whether no requested step is missing.

        Args:
            only: run only the arms of these names, with commas between.
            loads: run only the loads of these names, with commas between, and the comparison of tokens.
            budget: seconds. No step starts that is expected to end later.
            retry: whether failed steps run again.
        """
        self._until = time.monotonic() + budget
        missing = self.missing(only=only, loads=loads, retry=retry)
        left: list[Step] = []
        self._result.begin(self._command)
        with Processes(self._plan.name, self._envs, self._cache) as processes:
            if self._plan.keep:
                names = {step.arm.name for step in missing if not step.audits}
                self._start(processes, [arm for arm in self._plan.arms if arm.name in names], missing)
            for done, step in enumerate(missing):
                if step.arm.name in self._dead:
                    left.append(step)
                    continue
                if time.monotonic() + self._expected(step) > self._until:
                    left += missing[done:]
                    break
                start = time.monotonic()
                said = self._step(processes, step)
                took = time.monotonic() - start
                self._longest[_kind(step)] = max(took, self._longest.get(_kind(step), 0))
                self._report(f"{done + 1}/{len(missing)} {step.name}: {said} ({took:.0f} s)")
        if left:
            self._report(f"steps left: {len(left)}; run the same command again for them")
        return not left

    def _expected(self, step: Step) -> float:
        return self._longest.get(_kind(step), _AUDIT_S if step.audits else self._plan.seconds + _DRAIN_S)

    def _start(self, processes: Processes, arms: list[Arm], missing: list[Step], *, audit: bool = False) -> None:
        """Start servers and warm them up; the first missing step of an arm whose server fails has failed."""
        begun = time.monotonic()
        failed = processes.start(arms, max(self._until - begun, _DRAIN_S), audit=audit)
        for arm in arms:
            server = processes.running(arm)
            if server is not None:
                self._result.started(arm.name, None if audit else server.started, server.facts)
                with self._failing(failed, server):
                    self._sample(processes, server, "warm-up", _WARM_UP, _WARM_UP_OUTPUT)
            if arm.name in failed and time.monotonic() >= self._until:
                self._report(f"{arm.name}: its server was not ready within the budget")
            elif arm.name in failed:
                first = next(step for step in missing if step.arm.name == arm.name)
                self._lost(processes, first, failed[arm.name])
                self._report(f"{arm.name}: {failed[arm.name]}")
        self._report(f"{len(arms) - len(failed)} of {len(arms)} servers ready ({time.monotonic() - begun:.0f} s)")

    @contextlib.contextmanager
    def _failing(self, failed: dict[str, str], server: Server) -> Iterator[None]:
        """Note in `failed` why the client or the server failed."""
        try:
            yield
        except ChildError as error:
            failed[server.arm.name] = server.death() or str(error)

    def _step(self, processes: Processes, step: Step) -> str:
        """Run a step, keep its result, and return a line that says what came out."""
        server = processes.running(step.arm)
        if server is None or server.audit != step.audits:  # servers do not stay side by side
            for arm in self._plan.arms:
                processes.end(arm)
            self._start(processes, [step.arm], [step], audit=step.audits)
        server = processes.running(step.arm)
        if server is None:
            return "not run"
        failed: dict[str, str] = {}
        said = ""
        with self._failing(failed, server):
            work = self._tokens if step.load is None else self._audit if step.audits else self._load
            said = work(processes, server, step)
        if why := failed.get(step.arm.name):
            if server.process.process.poll() is not None:
                self._lost(processes, step, why)
            else:
                self._result.failed(step, why)
            return why
        return said

    def _lost(self, processes: Processes, step: Step, why: str) -> None:
        """Keep the failure of an arm whose server has ended, and run nothing more of this arm."""
        processes.end(step.arm)
        self._dead.add(step.arm.name)
        self._result.failed(step, why)

    def _load(self, processes: Processes, server: Server, step: Step) -> str:
        assert step.load is not None
        seconds = self._plan.seconds
        path = self._requests(f"{step.load.name}-{step.number}")
        requests = write_requests(path, step.load, step.number, self._plan, _vocabulary(step.arm), seconds)
        arguments = client_arguments(port=server.port, tokenizer=server.tokenizer, dataset=path, requests=requests)
        arguments += load_arguments(step.load, self._plan, step.number)
        run = _whole(processes.ask_client(step.arm, arguments, _SLOWER * seconds + _SPARE_S), requests)
        del run["texts"]
        self._result.measured(step, run)
        return (
            f"TTFT {run['ttft']['p50']:.0f} ms, TPOT {run['tpot']['p50']:.2f} ms, p99 {run['tpot']['p99']:.2f} ms, "
            f"{run['output_throughput']:.0f} tokens/s"
        )

    def _audit(self, processes: Processes, server: Server, step: Step) -> str:
        """Audit a server while its load runs over and over."""
        assert step.load is not None
        path = self._requests(f"{step.load.name}-audit")
        write_requests(path, step.load, step.number, self._plan, _vocabulary(step.arm), self._plan.seconds)
        try:
            report = audit_server(
                f"http://127.0.0.1:{server.port}",
                load=str(path),
                batch=step.load.concurrency or _AT_ONCE,
                steps=self._plan.audit_steps,
                seconds=min(_AUDIT_S, max((self._until - time.monotonic()) / 4, 1.0)),
            )
        except (AuditError, LoadError) as error:
            raise ChildError(str(error)) from None
        audit = digest(report) | host_time(report)
        self._result.audited(step, audit)
        idle = "not known" if audit["plain_idle"] is None else f"{audit['plain_idle']:.0%}"
        return f"{audit['critical'][0]:.2f} critical waits a step, host-caused idle {idle}"

    def _tokens(self, processes: Processes, server: Server, step: Step) -> str:
        """Serve the sampled requests, and compare their tokens with the reference's."""
        served = {
            kind: self._sample(processes, server, kind, self._plan.sampled, seeded=kind == "seeded")
            for kind in ("greedy", "seeded")
        }
        mine = {kind: requests_of(run["texts"]) for kind, run in served.items()}
        samples: dict[str, Any] = {
            kind: {"requests": run["completed"], "tokens": run["output_tokens"]} for kind, run in served.items()
        }
        samples["seeded"]["unlike_greedy"] = _different(mine["seeded"], mine["greedy"])
        if step.arm.name == self._plan.reference:
            for kind, run in served.items():
                samples[kind]["hashes"] = run["texts"]
            self._result.compared(step, samples)
            return f"{sum(run['completed'] for run in served.values())} requests to compare with"
        reference = self._result.document["tokens"].get(self._plan.reference)
        if reference is None:
            raise ChildError(f"there are no tokens of {self._plan.reference} to compare with; run that arm first")
        for kind in served:
            samples[kind]["different"] = _different(mine[kind], requests_of(reference[kind]["hashes"]))
        self._result.compared(step, samples)
        return ", ".join(f"{samples[kind]['different']} of {len(mine[kind])} {kind} requests differ" for kind in served)

    def _sample(
        self,
        processes: Processes,
        server: Server,
        name: str,
        requests: int,
        output: int = 0,
        *,
        seeded: bool = False,
    ) -> dict[str, Any]:
        path = self._requests(name)
        more = {"output": output} if output else {}
        write_sample(path, requests, _vocabulary(server.arm), self._plan.scale, **more)
        arguments = client_arguments(port=server.port, tokenizer=server.tokenizer, dataset=path, requests=requests)
        arguments += sample_arguments(_AT_ONCE, seeded=seeded)
        return _whole(processes.ask_client(server.arm, arguments, _SLOWER * self._plan.seconds + _SPARE_S), requests)

    def _requests(self, name: str) -> Path:
        return self._cache.resolve() / "requests" / f"{self._plan.name}-{name}.jsonl"


def _whole(run: dict[str, Any], requests: int) -> dict[str, Any]:
    """`run`, if all its requests were completed.

    Raises:
        ChildError: some were not.
    """
    if run["completed"] < requests:
        raise ChildError(f"{requests - run['completed']} of {requests} requests failed: {run['why']}")
    return run


def _different(one: list[str], other: list[str]) -> int:
    """How many requests differ; a request that only one list has differs too."""
    same = sum(mine == yours for mine, yours in zip(one, other, strict=False))
    return max(len(one), len(other)) - same


def _vocabulary(arm: Arm) -> int:
    size: int = find_shape(arm.shape).target["vocab_size"]
    return size


def _kind(step: Step) -> str:
    return "tokens" if step.load is None else "audit" if step.audits else step.load.name
