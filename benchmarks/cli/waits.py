"""`python -m benchmarks features --audit`: what waits, by feature."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from benchmarks import machine
from benchmarks.arms import PlanError, Plugin
from benchmarks.audited import AUDIT_STEPS
from benchmarks.cli.common import command_line, fail, fail_interrupted, failing, find_environments, say
from benchmarks.machine import installed_vllm
from benchmarks.results import RESULTS
from benchmarks.waits.cases import ENGINES, Case, WaitsError, find_cases
from benchmarks.waits.result import GROUPS, Group, WaitsResult
from benchmarks.waits.run import Budget, How, WaitsRunner


def run_waits(
    names: Sequence[str],
    *,
    only: str,
    plugin: Plugin,
    seconds: float,
    budget_s: float,
    together: int,
    retry: bool,
    cpu: bool,
    env: list[str] | None,
    out: Path | None,
    cache: Path,
) -> NoReturn:
    """Time and audit cases; ends with the command's exit code."""
    folder = out or (cache / "results" if cpu else RESULTS)
    with failing(WaitsError):
        cases = find_cases(names)
        groups = _groups(only, cpu=cpu)
        results = {group: WaitsResult(folder, group, plugin) for group in groups}
    envs = find_environments(env)
    _check_machine(groups, envs, cpu=cpu)
    how = How(plugin, seconds, AUDIT_STEPS, together, envs, cache, command_line())
    budget, complete = Budget(budget_s or float("inf")), True
    try:
        for group, result in results.items():
            runner = WaitsRunner(group, result, how, budget, say)
            _say_absent(group, cases)
            if not runner.missing(cases, retry=retry):
                say(f"{group.name}: nothing to run, {result.path} has these cases; delete it to measure them again")
                continue
            complete = runner.run(cases, retry=retry) and complete
            say(f"written to {result.path}")
    except (PlanError, WaitsError) as error:
        fail(str(error))
    except KeyboardInterrupt as interrupt:
        fail_interrupted(interrupt, "cases")
    failed = any("failed" in result.cases.get(case.name, {}) for result in results.values() for case in cases)
    raise typer.Exit(0 if complete and not failed else 1)


def _groups(only: str, *, cpu: bool) -> list[Group]:
    if cpu:
        if only:
            raise WaitsError(f"--only is {only!r}, and --cpu has one group; leave out one of the two")
        return [Group(installed_vllm() or "none", "V1", "tiny", cpu=True)]
    chosen = [group for group in GROUPS if any(part in group.name for part in only.split(","))]
    if not chosen:
        known = ", ".join(group.name for group in GROUPS)
        raise WaitsError(f"--only is {only!r}, which is in none of {known}; give a part of these names")
    return chosen


def check_gpu(*, cpu: bool) -> None:
    if not cpu and not machine.has_gpu():
        fail("the cases need a GPU, and this machine has none; run them where there is one, or give --cpu", 2)


def _check_machine(groups: Sequence[Group], envs: dict[str, Path], *, cpu: bool) -> None:
    check_gpu(cpu=cpu)
    if cpu and installed_vllm() is None:
        fail("vLLM is not installed in this environment; install it", 2)
    without = sorted({group.release for group in groups} - envs.keys() - {installed_vllm()})
    if without:
        fail(f"no environment has vLLM {', '.join(without)}; give --env RELEASE=FILE, or choose others with --only", 2)


def _say_absent(group: Group, cases: Sequence[Case]) -> None:
    for case in cases:
        engine = ENGINES[case.engine]
        if engine.shape(group.shape) is None:
            say(f"{group.name} {case.name}: not run, no model of the size {group.shape} has what it needs")
        elif group.cpu and engine.no_cpu:
            say(f"{group.name} {case.name}: not run, vLLM's CPU platform has no {engine.no_cpu}")
