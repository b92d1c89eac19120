"""Commands that compare an engine's tokens with stock's: soaks, and cases of vLLM's features."""

import contextlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import machine
from benchmarks.arms import PlanError, Plugin
from benchmarks.child import ChildError
from benchmarks.cli.common import CACHE, Cache, Env, fail, failing, find_environments, output_folder, say, write
from benchmarks.cli.waits import check_gpu, run_waits
from benchmarks.features.cases import FEATURES, FeatureError, find_feature
from benchmarks.features.run import Place, in_short, run_features
from benchmarks.soak.controls import BREAKS, BREAKS_ANY, CPU_CONTROLS, FEATURE_CONTROLS, SOAK_CONTROLS, can_show
from benchmarks.soak.run import SoakError, run_soak
from benchmarks.soak.soaks import SOAKS, Soak, find_soak
from benchmarks.waits.cases import CASES
from benchmarks.waits.result import GROUPS

app = typer.Typer()
_SECONDS, _TOGETHER = 2.0, 4
_Out = Annotated[
    Path | None, typer.Option(callback=output_folder, help="Folder of the results; nothing is written if unset.")
]
_Plugin = Annotated[
    Plugin, typer.Option(help="The plugin in the engine; `stock` compares stock with itself, which shows the noise.")
]


@app.command()
def soak(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(SOAKS)}.")],
    seconds: Annotated[float, typer.Option(min=1, help="Seconds during which requests arrive.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and delays.")] = 0,
    plugin: _Plugin = Plugin.ON,
    control: Annotated[
        str,
        typer.Option(help=f"Break the plugin on purpose; the command must fail. One of: {', '.join(SOAK_CONTROLS)}."),
    ] = "",
    env: Env = None,
    out: _Out = None,
    cache: Cache = CACHE,
) -> None:
    """Serve requests under random arrivals and, on a GPU, random delays, and compare the tokens with stock's.

    The result file is written once a minute, so an interrupted soak keeps its results.

    Exit code 0: no token differs; 1: a token differs, or an engine died; 2: this machine can't run the soak.
    """
    _check_control(control, SOAK_CONTROLS, plugin)
    path: Path | None = None
    with failing(PlanError, ChildError, SoakError):
        chosen = find_soak(name)
        if control:
            _check_shown(control, chosen)
        envs = find_environments(env, chosen.subject.release)
        if chosen.subject.needs_gpu and not machine.has_gpu():
            fail(f"the soak {name} needs a GPU, and this machine has none; run it where there is one, or take tiny", 2)
        few = machine.too_few_gpus(machine.gpus(), chosen.subject.gpus) if chosen.subject.needs_gpu else None
        if few:
            fail(f"the soak {name} {few}", 2)
        for found in run_soak(
            chosen,
            plugin=plugin,
            seconds=seconds,
            seed=seed,
            control=control or None,
            envs=envs,
            cache=cache,
            report=say,
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
        f"{outcomes['different']} different; fallbacks {found['fallbacks']}; steps by patch {found['prepared']}"
    )
    for index, place, behind in found["first_different"]:
        choice = "not among stock's next four" if behind is None else f"{behind:.3f} behind stock's"
        typer.echo(f"  request {index} differs from token {place} on, by a token {choice}")
    if plugin is Plugin.ON and (idle := [patch for patch in chosen.prepared if not found["prepared"].get(patch)]):
        fail(f"no step was prepared by {', '.join(idle)}, so this soak shows nothing of it; see the engine's log")
    raise typer.Exit(1 if outcomes["different"] else 0)


@app.command()
def features(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Cases to run; all if none is given: {', '.join(FEATURES)}. With --audit: {', '.join(CASES)}.",
        ),
    ] = None,
    release: Annotated[str, typer.Option(help="The vLLM release to test; this environment's if unset.")] = "",
    plugin: Annotated[
        Plugin | None,
        typer.Option(
            help="The plugin in the engine; `stock` compares stock with itself, which shows the noise. Default: "
            "`plugin`; with --audit `noop`, and `stock` is timed only.",
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        str,
        typer.Option(
            help=f"Break the plugin on purpose; the command must fail. One of: {', '.join(FEATURE_CONTROLS)}."
        ),
    ] = "",
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Run on a CPU, without delays and without cases that need a GPU.")
    ] = False,
    env: Env = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=output_folder,
            help="Folder of the results; nothing is written if unset, but with --audit benchmarks/results.",
        ),
    ] = None,
    cache: Cache = CACHE,
    audit: Annotated[
        bool, typer.Option("--audit", help="Time each feature beside plain decoding, and audit what waits.")
    ] = False,
    only: Annotated[
        str, typer.Option(help=f"With --audit, names or parts of: {', '.join(group.name for group in GROUPS)}.")
    ] = "",
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help=f"With --audit, timed seconds of each case; {_SECONDS:g} if unset.")
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option(min=1, help="With --audit, begin no case that would end after this many seconds.")
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(min=2, help=f"With --audit, most engines that run at once; {_TOGETHER} if unset."),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="With --audit, run failed cases again.")] = False,
) -> None:
    """Serve small cases of vLLM's other features with stock and with the plugin, and compare the tokens.

    With --audit: what waits, by feature, in a result file for each release, runner and size, written after each case.

    Exit code 0: every case has stock's tokens, or vLLM itself refuses the case; 1: a case differs, or an engine died;
    2: this machine can't run the cases. With --audit, 1 also means that cases are left.
    """
    if audit:
        if control or release:
            fail(
                f"--{'control' if control else 'release'} is not for --audit; leave it out"
                + ("" if control else ", and choose releases with --only")
            )
        run_waits(
            names or [],
            only=only,
            plugin=plugin or Plugin.NOOP,
            seconds=seconds or _SECONDS,
            budget_s=budget_s or 0,
            together=together or _TOGETHER,
            retry=retry,
            cpu=cpu,
            env=env,
            out=out,
            cache=cache,
        )
    given = {"--only": only, "--seconds": seconds, "--budget-s": budget_s, "--together": together, "--retry": retry}
    if unused := [option for option, value in given.items() if value]:
        fail(f"{unused[0]} has an effect only with --audit; add --audit, or leave it out")
    _compare_tokens(names or [], release, plugin or Plugin.ON, control, cpu=cpu, env=env, out=out, cache=cache)


def _compare_tokens(
    names: Sequence[str],
    release: str,
    plugin: Plugin,
    control: str,
    *,
    cpu: bool,
    env: list[str] | None,
    out: Path | None,
    cache: Path,
) -> None:
    _check_control(control, FEATURE_CONTROLS, plugin)
    if control and (release not in FEATURE_CONTROLS[control] or (cpu and control not in CPU_CONTROLS)):
        unless = "" if control in CPU_CONTROLS else ", and not --cpu"
        fail(f"--control {control} breaks {BREAKS[control]}; give --release {FEATURE_CONTROLS[control][-1]}{unless}")
    envs = find_environments(env, release or None)
    with failing(FeatureError):
        chosen = [find_feature(name) for name in names or FEATURES]
    check_gpu(cpu=cpu)
    for feature in chosen:
        if cpu and feature.no_cpu:
            say(f"{feature.name}: not run, vLLM's CPU platform has no {feature.no_cpu}")
    chosen = [feature for feature in chosen if not (cpu and feature.no_cpu)]
    place = Place(release or None, envs.get(release), cache, cpu)
    right = True
    for feature, found in run_features(chosen, place, plugin=plugin, control=control or None, report=say):
        right = right and found["verdict"] != "wrong"
        if out is not None:
            _written(out, f"features-{feature.name}", found)
        say(in_short(found))
    raise typer.Exit(0 if right else 1)


def _check_control(control: str, known: Collection[str], plugin: Plugin) -> None:
    if control not in ("", *known):
        fail(f"--control is {control!r}; it must be one of {', '.join(known)}")
    if control in BREAKS and plugin is not Plugin.ON:
        fail(f"--control {control} breaks the plugin, and --plugin is {plugin.value}; leave out one of the two")


def _check_shown(control: str, chosen: Soak) -> None:
    """Refuse a control that breaks nothing in this soak, which would then pass."""
    shown = [each.name for each in SOAKS.values() if can_show(control, each.subject)]
    if chosen.name not in shown:
        unused = f"breaks {(BREAKS | BREAKS_ANY)[control]}, which soak {chosen.name} does not use"
        fail(f"--control {control} {unused}; give one of {', '.join(shown)}")


def _written(folder: Path, stem: str, found: dict[str, Any]) -> Path:
    """Write a result and return its path; the file's name gives the control, or the plugin's state."""
    control, plugin = found["control"], found["plugin"]
    kind = f"-control-{control}" if control else "" if plugin == Plugin.ON.value else f"-{plugin}"
    path = folder / f"{stem}{kind}.json"
    with contextlib.suppress(OSError):  # writing tells why
        folder.mkdir(parents=True, exist_ok=True)
    write("--out", path, json.dumps(found, indent=1) + "\n")
    return path
