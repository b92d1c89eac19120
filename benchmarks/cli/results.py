"""Commands of plans: run a plan, show and draw results, write their figures into sentences."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from benchmarks.arms import Plan, PlanError, among
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
    console,
    fail,
    fail_interrupted,
    failing,
    find_environments,
    say,
    tell,
)
from benchmarks.loads import LoadError
from benchmarks.plans import PLANS, find_plan
from benchmarks.present import grid, notes
from benchmarks.results import RESULTS, ResultFile, figure_of, read_result, read_trace, result_files, trace_files
from benchmarks.runner import Runner
from benchmarks.serving.plan import ServePlan
from benchmarks.serving.results import find_served, served_files, shortened
from benchmarks.serving.table import halves, serve_grid, serve_notes
from benchmarks.shapes import ShapeError
from benchmarks.stored import ARCHIVE, exists
from benchmarks.stored import keep as keep_files
from benchmarks.summary import against, with_reference
from benchmarks.tables import TableError, documents, rewrite

AnyPlan = TypeVar("AnyPlan", Plan, ServePlan)
_EXAMPLE = """'{"compilation_config": {"cudagraph_mode": "FULL"}}'"""
EngineOptions = Annotated[
    str,
    typer.Option(
        "--engine", metavar="JSON", help=f"More engine arguments of all arms, such as {_EXAMPLE}; with --name."
    ),
]
app = typer.Typer()


@app.command()
def run(
    plan: Annotated[str, typer.Argument(help=f"One of: {', '.join(PLANS)}.")],
    only: Annotated[str, typer.Option(help="Run only arms whose name contains this, or one of several: a,b.")] = "",
    loads: Annotated[str, typer.Option(help="Only these loads of the plan: a,b; with --name.")] = "",
    env: Env = None,
    out: Out = RESULTS,
    name: Name = "",
    turns: Annotated[int, typer.Option(min=0, help="Turns of each arm; the plan's own if 0.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Timed seconds of a load in a turn; the plan's if 0.")] = 0,
    budget_s: Budget = 0,
    one_by_one: OneByOne = False,
    audit: Annotated[bool, typer.Option("--audit/--no-audit", help="Audit the loads that the plan has for it.")] = True,
    fresh: Fresh = False,
    retry: Retry = False,
    engine: EngineOptions = "",
    cache: Cache = CACHE,
) -> None:
    """Run the turns that a plan's result file lacks, and write the file after every turn.

    Exit code 0: the file has all requested turns; 1: turns are left, or a turn failed; 2: this machine can't run them.
    """
    try:
        asked = with_loads(find_plan(plan), loads, name)
        chosen = adjusted(asked, turns, seconds, audit=audit, one_by_one=one_by_one, engine=engine, name=name)
        path = out / f"{name or chosen.name}.json"
        result = ResultFile(path, chosen, fresh=fresh)
        runner = Runner(chosen, result, command=command_line(), envs=find_environments(env), cache=cache, report=say)
        if why := runner.lacks(chosen.named(only)):
            fail(
                f"the plan {plan} can't run here: {why}"
                + (f"; `python -m benchmarks show {path}` prints what was measured before" if exists(path) else ""),
                code=2,
            )
        if not runner.missing(only=only, retry=retry):
            typer.echo(
                f"nothing was run: {path} has all requested turns already; `python -m benchmarks show {path}` prints "
                "them, and --fresh measures them again"
            )
            raise typer.Exit(1 if any("error" in turn for turn in result.turns) else 0)
        done = runner.run(only=only, budget=budget_s or float("inf"), retry=retry)
    except (PlanError, LoadError, ShapeError) as error:
        fail(str(error))
    except KeyboardInterrupt as interrupt:
        fail_interrupted(interrupt, "turns")
    if result.turns:
        _show(result.document)
        typer.echo(f"written to {result.path}")
    raise typer.Exit(0 if done and not any("error" in turn for turn in result.turns) else 1)


@app.command()
def show(
    files: Annotated[list[Path] | None, typer.Argument(help="Result files; all of benchmarks/results if none.")] = None,
    to: Annotated[str, typer.Option("--against", help="Compare with this arm instead of the plan's reference.")] = "",
) -> None:
    """Print tables of results."""
    for path in files or [*result_files(), *served_files()]:
        found = _read(path)
        with failing(PlanError):
            if "served" in found:
                show_served(with_reference(found, to) if to else found)
            else:
                _show(against(found, to) if to else found)


@app.command()
def plot(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of results and traces; all of benchmarks/results if none.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="svg or png.")] = "svg",
) -> None:
    """Draw the figure of each result or trace: beside its JSON, or in .cache/figures for this repository's results."""
    if form not in ("svg", "png"):
        fail(f"--format is {form!r}; it must be svg or png")
    try:
        from benchmarks.plot import draw

        for path in files or [*result_files(), *served_files(), *trace_files()]:
            figure = figure_of(path, form)
            draw(_read(path, traces=True), figure)
            typer.echo(str(figure))
    except ModuleNotFoundError as error:
        fail(f"{error}; run `pip install 'vllm-async-spec[bench]'`")


@app.command()
def fill(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a figure is stale.")] = False,
) -> None:
    """Write the figures in sentences of README.md and docs/ from the results; the site makes the tables."""
    with failing(TableError, PlanError):
        stale = rewrite(documents())
    if check and stale:
        fail(
            f"stale figures in {', '.join(path.name for path in stale)}; run `python -m benchmarks fill` to write them"
        )
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        typer.echo(str(path))


@app.command()
def keep() -> None:
    """Put the files of benchmarks/results into the archive there, which git has, and remove them.

    Served results go without the hashes of their tokens.
    """
    try:
        kept = keep_files(RESULTS, shortened)
    except (OSError, ValueError) as error:
        fail(f"{error}; nothing was removed")
    typer.echo(f"in {RESULTS / ARCHIVE}: {', '.join(kept)}" if kept else f"nothing was done: {RESULTS} has no *.json")


def adjusted(
    plan: AnyPlan, turns: int, seconds: float, *, audit: bool, one_by_one: bool, engine: str, name: str
) -> AnyPlan:
    """The plan with what the command's options change; raises what `with_engine` raises."""
    return dataclasses.replace(
        with_engine(plan, engine, name),
        turns=turns or plan.turns,
        seconds=seconds or plan.seconds,
        audited=plan.audited if audit else (),
        keep=plan.keep and not one_by_one,
    )


def with_loads(plan: Plan, loads: str, name: str) -> Plan:
    """The plan with only some of its loads, by their names, for a result of another name.

    Raises:
        PlanError: the plan has no such load, or the name is the plan's.
    """
    if not loads:
        return plan
    _insist_on_name("--loads", plan, name, "all loads of the plan")
    chosen = {load.name: load for load in among(plan.name, plan.loads, "load", "loads", loads)}
    audited = tuple(load for load in plan.audited if load in chosen)
    return dataclasses.replace(plan, loads=tuple(chosen.values()), audited=audited)


def with_engine(plan: AnyPlan, options: str, name: str) -> AnyPlan:
    """The plan with more engine arguments, a JSON object, for all its arms; under a name of its own.

    Raises:
        PlanError: these are no such arguments, the name is the plan's, or the plan's arms differ in one of them.
    """
    if not options:
        return plan
    given = None
    with contextlib.suppress(ValueError):
        given = json.loads(options)
    if not isinstance(given, dict) or not given:
        raise PlanError(f"--engine is {options!r}; it must be a JSON object of engine arguments, such as {_EXAMPLE}")
    _insist_on_name("--engine", plan, name, "the plan's own settings")
    for option in given:
        if len({json.dumps(arm.engine.get(option), sort_keys=True) for arm in plan.arms}) > 1:
            raise PlanError(f"--engine sets {option}, in which the arms of {plan.name} differ; leave it out")
    arms = tuple(dataclasses.replace(arm, engine={**arm.engine, **given}) for arm in plan.arms)
    return dataclasses.replace(plan, name=name, about=f"{plan.about}, with {json.dumps(given)}", arms=arms)


def _insist_on_name(option: str, plan: AnyPlan, name: str, standing: str) -> None:
    """Raise PlanError if a result of `option` would have the plan's name, which stands for `standing`."""
    if name in ("", plan.name):
        raise PlanError(f"{option} needs a --name other than {plan.name}, which stands for {standing}")


def _read(path: Path, *, traces: bool = False) -> dict[str, Any]:
    try:
        return (read_trace(path) if traces else None) or find_served(path) or read_result(path)
    except (OSError, ValueError) as error:
        fail(f"{path} can't be read: {error}")


def show_served(document: dict[str, Any]) -> None:
    """Print a served result: its latencies, all else, and its notes."""
    for half in halves(serve_grid(document)):
        if half.rows:
            console.print(half.table(document["plan"]["about"]))
    tell(document, None, serve_notes(document))


def _show(document: dict[str, Any]) -> None:
    tell(document, grid(document).table(document["plan"]["about"]), notes(document))
