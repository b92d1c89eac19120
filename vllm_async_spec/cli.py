"""The command line: `vllm-async-spec demo | status | audit | compat | patches`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_async_spec._version import __version__
from vllm_async_spec.vllm_plugin.ledger.cli import AsJson, patches_app

if TYPE_CHECKING:
    from vllm_async_spec.compat.report import Report
    from vllm_async_spec.compat.results import BackendResult

app = typer.Typer(
    help="Speculative decoding in vLLM with no host-device synchronisation on the critical path.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(patches_app, name="patches")

_STYLE = {"applied": "green", "not needed": "dim", "refused": "bold red", "waiting": "yellow", "off": "dim"}


def main() -> None:
    """Run the command line."""
    app()


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"vllm-async-spec: {message}", err=True)
    raise typer.Exit(code)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    as_json: AsJson = False,
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens a step.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens generated for each prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each engine.")] = 4,
    cache: Annotated[
        Path | None, typer.Option(help="Directory for models and logs; default: ~/.cache/vllm-async-spec.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Your own target model; needs --draft.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Your own draft model, with the target's vocabulary.")] = None,
) -> None:
    """Serve one batch of prompts with vLLM in four ways, and check that all tokens are identical.

    The first run trains two small byte-level models. Exit code 0: all tokens are identical and the acceptance length
    does not fall; 1: otherwise, or the demo can't run.
    """
    from rich.progress import Progress

    from vllm_async_spec.demo.compare import DemoError, compare
    from vllm_async_spec.demo.terminal import print_comparison
    from vllm_async_spec.demo.train import DemoModels, prepare_models

    folder = cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-async-spec"
    if (target is None) != (draft is None):
        _fail("--target and --draft go together; give both, or neither for the demo's own models")
    for option, path in (("--target", target), ("--draft", draft)):
        if path is not None and not (path / "config.json").is_file():
            _fail(f"{option} is {str(path)!r}, which has no config.json; give the directory of a model")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            models = DemoModels(target, draft) if target and draft else prepare_models(folder, progress=progress)
            found = compare(
                models,
                draft_tokens=draft_tokens,
                max_tokens=max_tokens,
                rounds=rounds,
                log_dir=folder / "logs",
                progress=progress,
            )
        except (DemoError, OSError) as error:
            _fail(str(error))
        except ImportError as error:
            _fail(f"{error}; install vLLM, which includes this module, as the documentation's page on installing says")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_comparison(found, Console())
    for failure in found.failures:
        typer.echo(f"vllm-async-spec: {failure}", err=True)
    raise typer.Exit(1 if found.failures else 0)


@app.command()
def status(
    as_json: AsJson = False,
    model: Annotated[str | None, typer.Option(help="Show what an engine with this model would use.")] = None,
    speculative_config: Annotated[str | None, typer.Option(help="JSON, as `vllm serve` takes it.")] = None,
    async_scheduling: Annotated[
        bool | None, typer.Option(help="As `vllm serve` takes it; default: the plugin or vLLM decides.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Read the state of this running server from its /metrics.")] = None,
) -> None:
    """Show the environment, the state of each patch, and where each setting comes from.

    Exit code 0: no problem was found; 1: a patch was refused, vLLM does not load the plugin, or a setting or argument
    is wrong; 2: vLLM can't be imported, or no server with the plugin answers at --url.
    """
    if url is not None:
        if model is not None or speculative_config is not None or async_scheduling is not None:
            _fail(
                "--url reads a server, which has its own engine arguments; leave out --model, --speculative-config "
                "and --async-scheduling"
            )
        _status_of_server(url, as_json)
    from vllm_async_spec.vllm_plugin.ledger import PatchError
    from vllm_async_spec.vllm_plugin.settings import SettingError
    from vllm_async_spec.vllm_plugin.status import NoVllmError, read_status

    arguments: dict[str, Any] | None = None
    if model is not None:
        arguments = {"model": model}
        if speculative_config is not None:
            arguments["speculative_config"] = _json_object("--speculative-config", speculative_config)
        if async_scheduling is not None:
            arguments["async_scheduling"] = async_scheduling
    elif speculative_config is not None or async_scheduling is not None:
        _fail("--speculative-config and --async-scheduling have no effect without --model; add --model")
    try:
        found = read_status(arguments)
    except NoVllmError as error:
        _fail(str(error), 2)
    except (SettingError, PatchError) as error:
        _fail(str(error))
    except Exception as error:
        if model is None:
            raise
        _fail(f"vLLM does not take these engine arguments: {' '.join(str(error).split())}")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print_status(found)
    raise typer.Exit(0 if found.healthy else 1)


def _status_of_server(url: str, as_json: bool) -> NoReturn:
    from vllm_async_spec.vllm_plugin.server_status import ServerError, read_server

    try:
        found = read_server(url)
    except ServerError as error:
        _fail(str(error), 2)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold")
        facts.add_column(overflow="fold")
        facts.add_row("vllm-async-spec", f"{found.version}, on at {found.url}")
        facts.add_row("VLLM_ASYNC_SPEC", found.mode)
        facts.add_row("VLLM_ASYNC_SPEC_SYNC", found.sync)
        facts.add_row("patches", ", ".join(f"{count} {state}" for state, count in found.patches.items() if count))
        for name, reason in found.refused.items():
            facts.add_row("[bold red]refused[/]", f"{name}: {escape(reason)}")
        Console().print(facts)
    raise typer.Exit(0 if found.healthy else 1)


def _print_status(found: Any) -> None:
    console = Console()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    unknown = f" (unknown to vllm-async-spec {found.version}, which knows up to {found.newest_known})"
    facts.add_row("vllm-async-spec", found.version)
    facts.add_row("vLLM", found.vllm + ("" if found.known else unknown))
    facts.add_row("PyTorch", found.torch)
    facts.add_row("device", found.device)
    facts.add_row("family", found.family)
    facts.add_row("runner", found.runner)
    if found.backend is not None:
        facts.add_row("attention", found.backend)
    facts.add_row("scheduling", found.scheduling)
    for name, setting in found.settings.items():
        facts.add_row(name, f"{setting['value']} ({setting['from']})")
    console.print(facts)
    if found.failure is not None:
        console.print(f"The plugin failed, so vLLM runs as stock: {escape(found.failure)}", style="red")
    if not found.loaded:
        console.print(
            "vLLM does not load the plugin, because VLLM_PLUGINS is set and does not name async_spec; add async_spec, "
            "or unset VLLM_PLUGINS.",
            style="red",
        )
    table = Table(title="Patches", title_justify="left")
    for name in ("patch", "state", "why"):
        table.add_column(name, overflow="fold", no_wrap=name != "why")
    for patch in found.patches:
        table.add_row(patch.name, f"[{_STYLE[patch.state.value]}]{patch.state.value}[/]", escape(patch.detail))
    console.print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def audit(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Start an engine with this model; every argument of `vllm serve` may follow.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Audit a running server, which was started with VLLM_ASYNC_SPEC_AUDIT=1.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", metavar="KEY", help="An API key of the server at --url.")
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(help="decode, mixed, or a file of JSON lines; default: decode, or the server's traffic."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    steps: Annotated[int, typer.Option(min=3, max=2048, help="Steps to record.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Time limit of each of a server's recordings.")] = 120,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this JSON file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report to this HTML file.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="off: audit stock vLLM too, and show both.", metavar="off")
    ] = None,
    log: Annotated[Path, typer.Option(help="File for the engine's log.")] = Path("vllm-async-spec-audit.log"),
) -> None:
    """Find what makes the host wait for the GPU in a running engine: each line of code, how often, and for how long.

    Exit code 0: the audit was made; 1: the audit failed.
    """
    from vllm_async_spec.audit.engine import AuditError
    from vllm_async_spec.audit.html import render_html
    from vllm_async_spec.audit.launch import audit_model, audit_server
    from vllm_async_spec.audit.loads import LoadError
    from vllm_async_spec.audit.terminal import print_report

    if (model is None) == (url is None):
        _fail("an audit needs either --model, to start an engine, or --url, to ask a running server; give one of them")
    if compare not in (None, "off"):
        _fail(f"--compare is {compare!r}; it must be off")
    if url is not None and (compare is not None or context.args):
        unused = " ".join(context.args) or "--compare"
        _fail(f"{unused} has no effect on a running server; leave out {unused}, or use --model")
    source = context.get_parameter_source("api_key")
    if model is not None and source is not None and source.name == "COMMANDLINE":
        _fail("--api-key has no effect on an engine that the audit starts; leave out --api-key, or use --url")
    for option, path in (("--json", json_file), ("--html", html_file), ("--log", log)):
        if path is not None and not path.absolute().parent.is_dir():
            _fail(f"{option} is {str(path)!r}, whose directory does not exist; create the directory, or name another")
    errors = Console(stderr=True)
    before = None
    try:
        with errors.status("auditing the server") as status:
            if url is not None:
                found = audit_server(url, load=load, batch=batch, steps=steps, seconds=seconds, api_key=api_key)
            else:
                arguments = ["--model", str(model), *context.args]
                options: dict[str, Any] = {"load": load or "decode", "batch": batch, "steps": steps}
                if compare == "off":
                    before = audit_model(
                        arguments, **options, plugin=False, log=log, stage=lambda s: status.update(f"stock vLLM: {s}")
                    )
                found = audit_model(arguments, **options, plugin=True, log=log, stage=status.update)
    except (AuditError, LoadError) as error:
        _fail(str(error))
    if json_file is not None:
        data = {"report": found.to_dict(), "before": None if before is None else before.to_dict()}
        json_file.write_text(json.dumps(data, indent=1), encoding="utf-8")
    if html_file is not None:
        html_file.write_text(render_html(found, before), encoding="utf-8")
    print_report(found, Console(), before)


@app.command()
def compat(
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", metavar="NAME", help="A backend of vLLM's, or module:Builder; default: all of vLLM's."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda for a GPU, or cpu for a simulated device.", metavar="cpu|cuda")
    ] = "cpu",
    vllm_source: Annotated[
        Path | None, typer.Option(help="The directory that contains vllm/, such as an unpacked wheel.")
    ] = None,
    plugin: Annotated[bool, typer.Option("--plugin", help="Apply the plugin's patches first.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all evidence to this JSON file.")] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table to this Markdown file.")
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write a test for each batch to this JUnit file, for CI.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the table to this HTML file.")] = None,
    badge_file: Annotated[Path | None, typer.Option("--badge", help="Write the last line to this SVG badge.")] = None,
) -> None:
    """Check whether metadata builders make the host wait: without host lengths, with upper bounds, and with garbage.

    Exit code 0: no builder makes the host wait in a step, and each builds the right metadata; 1: a builder waits or
    builds wrong metadata; 2: a builder could not be tried.
    """
    from vllm_async_spec.compat.builder_inputs import SubjectError
    from vllm_async_spec.compat.render import badge, junit, markdown, print_report, render_html
    from vllm_async_spec.compat.vllm_source import VllmSourceError

    written: dict[str, tuple[Path | None, Callable[[Report], str]]] = {
        "--json": (json_file, lambda report: json.dumps(report.to_dict(), indent=1)),
        "--markdown": (markdown_file, lambda report: markdown(report.published)),
        "--junit": (junit_file, junit),
        "--html": (html_file, lambda report: render_html([report.published])),
        "--badge": (badge_file, lambda report: badge(report.published)),
    }
    for option, (path, _) in written.items():
        if path is not None and not path.absolute().parent.is_dir():
            _fail(f"{option} is {str(path)!r}, whose directory does not exist; create the directory, or name another")
    try:
        with Console(stderr=True).status("") as status:
            found = _try(backends or [], plugin, device, vllm_source, status.update)
    except (SubjectError, VllmSourceError) as error:
        _fail(str(error), 2)
    for path, make in written.values():
        if path is not None:
            path.write_text(make(found), encoding="utf-8")
    print_report(found, Console())
    raise typer.Exit(found.exit_code)


def _try(
    names: Sequence[str],
    plugin: bool,
    device: str = "cuda",
    vllm_source: Path | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run the suite in this process, which has imported no vLLM yet."""
    from vllm_async_spec.compat.suite import open_device, prepare, run

    source = prepare(vllm_source, plugin=plugin)
    opened = open_device(device, source)
    patches = _load_plugin() if plugin else None
    elsewhere = functools.partial(_try_elsewhere, plugin=plugin)
    return run(names, opened, source=source, patches=patches, progress=progress, elsewhere=elsewhere)


def _try_elsewhere(names: Sequence[str], *, plugin: bool) -> Sequence[BackendResult]:
    """Run the suite on the GPU in a spawned process with its own CUDA context."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_try, names, plugin).result().results


def _load_plugin() -> Callable[[], dict[str, str]]:
    """Apply the patches; the function returned gives the current state of each patch."""
    from vllm_async_spec.vllm_plugin.plugin import load

    ledger = load(report=False).ledger
    return lambda: {name: outcome.state.value for name, outcome in ledger.outcomes.items()} if ledger else {}


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        _fail(f'{option} is {text!r}, which is not JSON ({error}); give an object such as \'{{"method": "eagle"}}\'')
    if not isinstance(value, dict):
        _fail(f'{option} is {text!r}; it must be a JSON object such as \'{{"method": "eagle"}}\'')
    return value
