"""The command line: `python -m benchmarks COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.arms import Plan, PlanError, Plugin
from benchmarks.child import ChildError
from benchmarks.features.cases import FEATURES, FeatureError, find_feature
from benchmarks.features.run import Place, in_short, run_features
from benchmarks.loads import LoadError
from benchmarks.plans import PLANS, find_plan
from benchmarks.present import grid, notes
from benchmarks.results import RESULTS, ResultFile, figure_of, read_result, read_trace, result_files, trace_files
from benchmarks.runner import Runner, installed_vllm
from benchmarks.shapes import ShapeError
from benchmarks.soak.controls import BREAKS, FEATURE_CONTROLS, RUNNER_RELEASES, SOAK_CONTROLS, can_show
from benchmarks.soak.run import SoakError, run_soak
from benchmarks.soak.soaks import SOAKS, Soak, find_soak
from benchmarks.summary import against
from benchmarks.tables import TableError, documents, rewrite

app = typer.Typer(
    help="Every measurement of this project; docs/benchmarks.md says how to read one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_Json = Annotated[Path | None, typer.Option("--json", help="Write the result here too.")]
_Env = Annotated[
    list[str] | None,
    typer.Option(metavar="RELEASE=FILE", help="For a vLLM release: a shell file to source, or a Python."),
]
_Cache = Annotated[Path, typer.Option(help="Folder for model directories and logs.")]
_Out = Annotated[Path | None, typer.Option(help="Folder of the results; none is written if unset.")]
_Plugin = Annotated[
    Plugin, typer.Option(help="The plugin in the engine; `stock`, held to itself, shows what noise is.")
]
_CACHE = Path(".cache/benchmarks")
_PAGE = 150
"""Columns of a table that goes to a file, which has no width of its own."""

console = Console() if sys.stdout.isatty() else Console(width=_PAGE)


def _fail(message: str) -> NoReturn:
    typer.echo(f"benchmarks: {message}", err=True)
    raise typer.Exit(1)


@contextlib.contextmanager
def _failing(*errors: type[Exception]) -> Iterator[None]:
    """End with the message of any of `errors`, which is one sentence for whoever gave the command."""
    try:
        yield
    except errors as error:
        _fail(str(error))


@app.command()
def run(
    plan: Annotated[str, typer.Argument(help=f"One of: {', '.join(PLANS)}.")],
    only: Annotated[str, typer.Option(help="Run only arms whose name contains this, or one of several: a,b.")] = "",
    env: _Env = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the result file; that of the plan if unset.")] = "",
    turns: Annotated[int, typer.Option(min=0, help="Turns of each arm; the plan's own if 0.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Timed seconds of a load in a turn; the plan's if 0.")] = 0,
    budget_s: Annotated[float, typer.Option(min=0, help="Begin no turn that would end later than this; 0: none.")] = 0,
    audit: Annotated[bool, typer.Option("--audit/--no-audit", help="Audit the arms, if the plan does.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what the result file holds.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try turns again that failed.")] = False,
    cache: _Cache = _CACHE,
) -> None:
    """Run what a plan's result file lacks, and write it after every turn.

    Exit code 0: all that was asked for is there; 1: turns are left, or one failed.
    """
    try:
        chosen = _adjusted(find_plan(plan), turns, seconds, audit)
        path = out / f"{name or chosen.name}.json"
        if fresh and path.is_file():
            read_result(path)  # or it is no result, and not ours to throw away
            path.unlink()
        result = ResultFile(path, chosen)
        command = f"python -m benchmarks {shlex.join(sys.argv[1:])}"
        runner = Runner(chosen, result, command=command, envs=_environments(env), cache=cache, report=_say)
        done = runner.run(only=only, budget=budget_s or float("inf"), retry=retry)
    except (PlanError, LoadError, ShapeError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; what was finished is kept, and the same command goes on from there")
    if result.turns:
        _show(result.document)
        typer.echo(f"written to {result.path}")
    raise typer.Exit(0 if done and not any("error" in turn for turn in result.turns) else 1)


@app.command()
def show(
    files: Annotated[list[Path] | None, typer.Argument(help="Result files; all of them if none.")] = None,
    to: Annotated[str, typer.Option("--against", help="Compare with this arm instead of the plan's reference.")] = "",
) -> None:
    """Print results that are there."""
    for path in files or result_files():
        found = _read(path)
        with _failing(PlanError):
            _show(against(found, to) if to else found)


@app.command()
def plot(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of results and traces; all of them if none.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="svg or png.")] = "svg",
) -> None:
    """Draw the figure of each result or trace: beside its JSON, or in .cache/figures for this repository's own."""
    if form not in ("svg", "png"):
        _fail(f"--format is {form!r}; it must be svg or png")
    try:
        from benchmarks.plot import draw

        for path in files or [*result_files(), *trace_files()]:
            figure = figure_of(path, form)
            draw(_read(path, traces=True), figure)
            typer.echo(str(figure))
    except ModuleNotFoundError as error:
        _fail(f"{error}; `pip install 'vllm-async-spec[bench]'` has it")


@app.command()
def tables(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a table is stale.")] = False,
) -> None:
    """Write the tables in docs/*.md from the results."""
    with _failing(TableError, PlanError):
        stale = rewrite(documents())
    if check and stale:
        _fail(f"stale tables in {', '.join(path.name for path in stale)}; `python -m benchmarks tables` writes them")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        typer.echo(str(path))


@app.command()
def trace(
    technique: Annotated[str, typer.Argument(help="stopping, static, interleaving or batching.")],
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="Where the timeline goes; `plot` draws it.")],
    model: Annotated[str, typer.Option(help="Its size, with random weights; the technique's own if unset.")] = "",
    batch: Annotated[int, typer.Option(min=0, help="Sequences; the technique's own number if 0.")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=20, help="Steps that are shown of each arm.")] = 3,
    drafts: Annotated[int, typer.Option(min=0, help="Of batching: drafts of each sequence and step.")] = 0,
) -> None:
    """Record a few decode steps of a technique on a GPU, with its wait and without."""
    from benchmarks.tracing import TraceError, record, write
    from vllm_async_spec.generation.batching import AttentionChoiceError

    command = f"python -m benchmarks {shlex.join(sys.argv[1:])}"
    with _failing(AttentionChoiceError, TraceError):
        found = record(technique, size=model, batch=batch, steps=steps, drafts=drafts, command=command)
    write(found, out)
    for name, arm in found["arms"].items():
        typer.echo(f"{name}: {arm['step_us']} µs a step, {arm['critical_waits']} critical waits a step, while recorded")
    typer.echo(f"written to {out}")


@app.command()
def host_time(
    json_file: _Json = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, half of them in each order.")] = 20,
) -> None:
    """Host time that the plugin adds to constructing vLLM's attention metadata."""
    from benchmarks.host_time import measure, table

    found = measure(rounds)
    _tell(found, table(found), json_file=json_file)


@app.command()
def held(
    json_file: _Json = None,
    times: Annotated[int, typer.Option(min=1, help="How often each call is looked at.")] = 20,
) -> None:
    """How long single calls of a step hold the host while the device is busy."""
    from benchmarks.held import HeldError, measure, table

    with _failing(HeldError):
        found = measure(times)
    _tell(found, table(found), json_file=json_file)


@app.command()
def kernels(
    json_file: _Json = None,
    tokens: Annotated[int, typer.Option(min=2, max=32, help="Query tokens of each request.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads, of 32 query heads.")] = 8,
) -> None:
    """How long kernels take to verify drafts, each alone and in a layer, on a Hopper GPU."""
    from benchmarks.kernels import KernelError, measure, table

    with _failing(KernelError):
        found = measure(tokens, kv_heads)
    _tell(found, table(found), json_file=json_file)


@app.command()
def plan_time(
    json_file: _Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each, every builder has two turns.")] = 5,
) -> None:
    """Host time of a step's metadata with FlashInfer: vLLM's builder and the plugin's, on a GPU."""
    from benchmarks.plan_time import PlanTimeError, measure, table
    from vllm_async_spec.compat.suite import prepare

    prepare(None)
    with _failing(PlanTimeError):
        found = measure(rounds)
    _tell(found, table(found), json_file=json_file)


@app.command()
def step_time(
    json_file: _Json = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 32,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, half of them in each order.")] = 20,
) -> None:
    """Host time that the optimistic runner of vLLM 0.14 to 0.18 adds to a step, and takes away."""
    from benchmarks.step_time import StepTimeError, measure, table

    with _failing(StepTimeError):
        found = measure(batch, rounds)
    _tell(found, table(found), json_file=json_file)


@app.command()
def generation(
    json_file: _Json = None,
    model: Annotated[str, typer.Option(help="tiny, gpt2 or medium, with random weights.")] = "tiny",
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one, if unset.")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each of them gets.")] = 200,
    passes: Annotated[int, typer.Option(min=1, help="Passes; in each, every arm has two turns.")] = 10,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Arms of torch.compile, on a GPU.")] = True,
    arms: Annotated[str, typer.Option(help="Which arms, with commas between; all but tuned ones if unset.")] = "",
) -> None:
    """transformers' generate: stop checks waited for and not, and a decode loop of our own."""
    import torch

    from benchmarks.generation import ARMS, COMPILED, GenerationError, measure, notes, table

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    every = [*ARMS, *(COMPILED if compiled and chosen.startswith("cuda") else [])]
    names = _named(arms, every)
    with _failing(GenerationError):
        found = measure(size=model, device=chosen, batch=batch, new_tokens=new_tokens, passes=passes, arms=names)
    _tell(found, table(found), notes(found), json_file)


@app.command()
def batching(
    json_file: _Json = None,
    model: Annotated[str, typer.Option(help="tiny, 1b or 8b, with random weights.")] = "tiny",
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one, if unset.")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 32,
    requests: Annotated[int, typer.Option(min=0, help="Sequences in all; those of one batch if 0.")] = 0,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each of them gets.")] = 64,
    passes: Annotated[int, typer.Option(min=1, help="Passes; in each, every arm has two turns.")] = 3,
    attention: Annotated[str, typer.Option(help="Of the batcher; its option of this name.")] = "auto",
    arms: Annotated[str, typer.Option(help="Which arms, with commas between; all of them if unset.")] = "",
    drafts: Annotated[int, typer.Option(min=0, help="Drafts of each sequence and step, for arms that draft.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the decodes of our arms.")] = False,
) -> None:
    """Continuous batching: steps waited for and not, with a draft model and without, and transformers' own.

    What it does is told on stderr as it does it. The file is written after each pass, and says whether it is complete.
    """
    import torch

    from benchmarks.batching import ARMS, DRAFTED, BatchingError, measure, notes, table
    from vllm_async_spec.generation.batching import AttentionChoiceError

    with _failing(AttentionChoiceError, BatchingError):
        found = measure(
            size=model,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            batch=batch,
            requests=requests or batch,
            prompt=prompt,
            new_tokens=new_tokens,
            passes=passes,
            attention=attention,
            arms=_named(arms, [*ARMS, *(DRAFTED if drafts else ())]),
            drafts=drafts,
            compiled=compiled,
            say=_progress(),
            keep=lambda so_far: _write(so_far, json_file),
        )
    _tell(found, table(found), notes(found), json_file)


@app.command()
def soak(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(SOAKS)}.")],
    seconds: Annotated[float, typer.Option(min=1, help="For how long requests arrive.")] = 600,
    seed: Annotated[int, typer.Option(help="Of arrivals and delays.")] = 0,
    plugin: _Plugin = Plugin.ON,
    control: Annotated[
        str, typer.Option(help=f"Break the plugin on purpose, which must be noticed: {', '.join(SOAK_CONTROLS)}.")
    ] = "",
    env: _Env = None,
    out: _Out = None,
    cache: _Cache = _CACHE,
) -> None:
    """Serve requests under random arrivals and, on a GPU, random delays, and hold each to stock's tokens.

    The file is written once a minute, so that a soak which is cut off was not for nothing.

    Exit code 0: no token differs; 1: one does, or an engine died.
    """
    _check_control(control, SOAK_CONTROLS, plugin)
    path: Path | None = None
    with _failing(PlanError, ChildError, SoakError):
        chosen = find_soak(name)
        if control:
            _check_shown(control, chosen)
        for found in run_soak(
            chosen,
            plugin=plugin,
            seconds=seconds,
            seed=seed,
            control=control or None,
            envs=_environments(env, chosen.subject.release),
            cache=cache,
            report=_say,
        ):
            if out is not None:
                path = _written(out, f"soak-{name}", found)
    if path is not None:
        typer.echo(f"written to {path}")
    outcomes, delayed = found["outcomes"], sum(found["delays"].values())
    typer.echo(
        f"{sum(outcomes.values())} requests, {found['tokens']} tokens in {found['seconds']} s, {delayed} delays: "
        f"{outcomes['same']} as stock, {outcomes['swapped']} with a near tie swapped "
        f"(at most {found['widest_swap']:.3f} apart), "
        f"{outcomes['different']} different; fallbacks {found['fallbacks']}"
    )
    for index, place, behind in found["first_different"]:
        choice = "none of its next four choices" if behind is None else f"a choice {behind:.3f} behind"
        typer.echo(f"  request {index} differs from its token {place} on: {choice}")
    raise typer.Exit(1 if outcomes["different"] else 0)


@app.command()
def features(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help=f"All, or some of: {', '.join(FEATURES)}.")
    ] = None,
    release: Annotated[str, typer.Option(help="The vLLM release that it must be; this environment's if unset.")] = "",
    plugin: _Plugin = Plugin.ON,
    control: Annotated[
        str, typer.Option(help=f"Break the plugin on purpose, which must be noticed: {', '.join(FEATURE_CONTROLS)}.")
    ] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="As far as a CPU engine goes, without delays.")] = False,
    env: _Env = None,
    out: _Out = None,
    cache: _Cache = _CACHE,
) -> None:
    """Serve small cases of what else vLLM can do, stock and with the plugin, and hold the tokens to stock's.

    Exit code 0: every case is as stock, or vLLM itself refuses it; 1: one is not, or an engine died.
    """
    _check_control(control, FEATURE_CONTROLS, plugin)
    if control and (cpu or release not in RUNNER_RELEASES):
        _fail(f"--control {control} breaks {BREAKS[control]}; give --release {RUNNER_RELEASES[-1]}, and not --cpu")
    envs = _environments(env, release or None)
    with _failing(FeatureError):
        chosen = [find_feature(name) for name in names or FEATURES]
    for feature in chosen:
        if cpu and feature.no_cpu:
            _say(f"{feature.name}: not run, vLLM's CPU platform has no {feature.no_cpu}")
    chosen = [feature for feature in chosen if not (cpu and feature.no_cpu)]
    place = Place(release or None, envs.get(release), cache, cpu)
    right = True
    for feature, found in run_features(chosen, place, plugin=plugin, control=control or None, report=_say):
        right = right and found["verdict"] != "wrong"
        if out is not None:
            _written(out, f"features-{feature.name}", found)
        _say(in_short(found))
    raise typer.Exit(0 if right else 1)


def _adjusted(plan: Plan, turns: int, seconds: float, audit: bool) -> Plan:
    steps = plan.audit_steps if audit else 0
    return dataclasses.replace(plan, turns=turns or plan.turns, seconds=seconds or plan.seconds, audit_steps=steps)


def _check_control(control: str, known: Sequence[str], plugin: Plugin) -> None:
    if control not in ("", *known):
        _fail(f"--control is {control!r}; it must be one of {', '.join(known)}")
    if control in BREAKS and plugin is not Plugin.ON:
        _fail(f"--control {control} breaks the plugin, and --plugin is {plugin.value}; leave out one of the two")


def _check_shown(control: str, chosen: Soak) -> None:
    """Refuse a control that breaks nothing of this soak, which would then be as green as without it."""
    shown = [each.name for each in SOAKS.values() if can_show(control, each.subject)]
    if chosen.name not in shown:
        broken = f"{BREAKS[control]}, and nothing of soak {chosen.name}"
        _fail(f"--control {control} breaks {broken}; give one of {', '.join(shown)}")


def _environments(given: list[str] | None, needed: str | None = None) -> dict[str, Path]:
    """By vLLM release, what was given for it; the release that is needed is there, or installed here."""
    environments = {}
    for each in given or []:
        release, _, file = each.partition("=")
        if not file:
            _fail(f"--env is {each!r}; it must be RELEASE=FILE, such as 0.32.0=/opt/vllm-0.32.0/env.sh")
        if not Path(file).is_file():
            _fail(f"--env {release} is {file!r}, which is no file; give a shell file to source, or a Python")
        environments[release] = Path(file).absolute()
    if needed not in (None, installed_vllm(), *environments):
        _fail(f"no environment has vLLM {needed}; give --env {needed}=FILE")
    return environments


def _written(folder: Path, stem: str, found: dict[str, Any]) -> Path:
    """The file that a result is now in; its name says what was broken, or whose vLLM it was."""
    control, plugin = found["control"], found["plugin"]
    kind = f"-control-{control}" if control else "" if plugin == Plugin.ON.value else f"-{plugin}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}{kind}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def _read(path: Path, *, traces: bool = False) -> dict[str, Any]:
    try:
        return (read_trace(path) if traces else None) or read_result(path)
    except (OSError, ValueError) as error:
        _fail(f"{path} can't be read: {error}")


def _show(document: dict[str, Any]) -> None:
    found = grid(document)
    table = Table(*found.head, title=document["plan"]["about"])
    for row in found.rows:
        table.add_row(*map(escape, row))
    _tell(document, table, notes(document))


def _named(arms: str, otherwise: Sequence[str]) -> list[str]:
    """The arms that `--arms` names; the others if it is unset."""
    return [name.strip() for name in arms.split(",")] if arms else list(otherwise)


def _tell(found: Mapping[str, Any], table: Table, remarks: Iterable[str] = (), json_file: Path | None = None) -> None:
    """Print a result, and write it where that was asked for."""
    console.print(table)
    for remark in remarks:
        typer.echo(remark)
    _write(found, json_file)


def _write(found: Mapping[str, Any], json_file: Path | None) -> None:
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


def _progress() -> Callable[[str], None]:
    """Tells on stderr what is being done, each time with the seconds since now."""
    start = time.monotonic()
    return lambda line: typer.echo(f"{time.monotonic() - start:6.1f} s: {line}", err=True)


def _say(line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)
