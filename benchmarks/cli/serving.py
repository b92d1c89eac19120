"""The command of served plans."""

from typing import Annotated

import typer

from benchmarks.arms import PlanError
from benchmarks.cli.common import (
    CACHE,
    Budget,
    Cache,
    Env,
    Fresh,
    Name,
    OneByOne,
    Out,
    Retry,
    command_line,
    fail,
    fail_interrupted,
    find_environments,
    say,
)
from benchmarks.cli.results import EngineOptions, adjusted, show_served
from benchmarks.facts import EngineError
from benchmarks.plans.serving import SERVE_PLANS, find_serve_plan
from benchmarks.results import RESULTS
from benchmarks.serving.results import ServeFile, faults
from benchmarks.serving.run import ServeRunner
from benchmarks.shapes import ShapeError

app = typer.Typer()


@app.command()
def serve(
    plan: Annotated[str, typer.Argument(help=f"One of: {', '.join(SERVE_PLANS)}.")],
    only: Annotated[str, typer.Option(help="Run only these arms: a,b.")] = "",
    loads: Annotated[str, typer.Option(help="Run only these loads, and compare tokens: a,b.")] = "",
    env: Env = None,
    out: Out = RESULTS,
    name: Name = "",
    turns: Annotated[int, typer.Option(min=0, help="Turns of each arm in a load; the plan's own if 0.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="About how long a load lasts; the plan's if 0.")] = 0,
    budget_s: Budget = 0,
    audit: Annotated[bool, typer.Option("--audit/--no-audit", help="Audit servers at the end.")] = True,
    one_by_one: OneByOne = False,
    fresh: Fresh = False,
    retry: Retry = False,
    engine: EngineOptions = "",
    cache: Cache = CACHE,
) -> None:
    """Start `vllm serve` for each arm, drive the servers in turns with vLLM's own client, and compare.

    The result file is written after every step; the same command continues an interrupted run.

    Exit code 0: the file has all requested steps; 1: steps are left, or a step failed; 2: this machine can't run them.
    """
    try:
        chosen = adjusted(
            find_serve_plan(plan), turns, seconds, audit=audit, one_by_one=one_by_one, engine=engine, name=name
        )
        path = out / f"{name or chosen.name}.json"
        result = ServeFile(path, chosen, fresh=fresh)
        envs = find_environments(env)
        runner = ServeRunner(chosen, result, command=command_line(), envs=envs, cache=cache, report=say)
        if why := runner.lacks(chosen.named(only)):
            fail(f"the plan {plan} can't run here: {why}", code=2)
        if not runner.missing(only=only, loads=loads, retry=retry):
            typer.echo(
                f"nothing was run: {path} has all requested steps already; `python -m benchmarks show {path}` prints "
                "them, --retry runs failed steps again, and --fresh measures all again"
            )
            raise typer.Exit(1 if result.document["failures"] else 0)
        done = runner.run(only=only, loads=loads, budget=budget_s or float("inf"), retry=retry)
    except (PlanError, ShapeError, EngineError) as error:
        fail(str(error))
    except KeyboardInterrupt as interrupt:
        fail_interrupted(interrupt, "steps")
    show_served(result.document)
    typer.echo(f"written to {result.path}")
    if found := faults(result.document):
        fail("; ".join(found))
    raise typer.Exit(0 if done and not result.document["failures"] else 1)
