"""`vllm-async-spec status`: of this environment, of an engine with some arguments, or of a running server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_async_spec.cli.common import LEFT_OUT, AsJson, fail, json_object, progress_on_stderr, refuse

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.server_status import ServerStatus
    from vllm_async_spec.vllm_plugin.status import Status

_STYLE = {"applied": "green", "not needed": "dim", "refused": "bold red", "waiting": "yellow", "off": "dim"}


def status(
    context: typer.Context,
    as_json: AsJson = False,
    model: Annotated[
        str | None,
        typer.Option(help="Show what an engine with this model would use; every argument of `vllm serve` may follow."),
    ] = None,
    speculative_config: Annotated[str | None, typer.Option(help="JSON, as `vllm serve` takes it.")] = None,
    async_scheduling: Annotated[
        bool | None, typer.Option(help="As `vllm serve` takes it; default: the plugin or vLLM decides.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Read the state of this running server from its /metrics.")] = None,
) -> None:
    """Show the environment, the state of each patch, and where each setting comes from.

    With a model and other arguments of `vllm serve`, also whether scheduling would be asynchronous, who decides that,
    and why.

    Exit code 0: no problem was found; 1: a patch was refused, vLLM does not load the plugin, a setting is wrong, or
    vLLM refuses the engine arguments; 2: vLLM can't be imported, no server with the plugin answers at --url, or the
    command line has a mistake.
    """
    options = _options(model, speculative_config, async_scheduling)
    given = [*context.args, *options]
    if url is not None:
        if given:
            refuse(f"--url reads a server, which has its own engine arguments; leave out {given[0]}")
        _status_of_server(url, as_json)
    if given and model is None and all(argument.startswith("-") for argument in context.args):
        refuse(f"{given[0]} has no effect without a model; give the model first, or with --model")
    from vllm_async_spec.vllm_plugin.ledger import PatchError
    from vllm_async_spec.vllm_plugin.serve_arguments import ArgumentsError
    from vllm_async_spec.vllm_plugin.settings import SettingError
    from vllm_async_spec.vllm_plugin.status import NoVllmError, read_status

    try:
        with progress_on_stderr("Loading vLLM and the plugin.") as progress:
            found = read_status(given or None, progress)
    except NoVllmError as error:
        fail(str(error), 2)
    except (SettingError, PatchError) as error:
        fail(str(error))
    except ArgumentsError as error:
        fail(f"vLLM does not take these engine arguments: {error}")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print_status(found)
    raise typer.Exit(0 if found.healthy else 1)


def _options(model: str | None, speculative_config: str | None, async_scheduling: bool | None) -> list[str]:
    """The arguments of `vllm serve` that are options of this command too."""
    options = [] if model is None else ["--model", model]
    if speculative_config is not None:
        json_object("--speculative-config", speculative_config)
        options += ["--speculative-config", speculative_config]
    if async_scheduling is not None:
        options.append("--async-scheduling" if async_scheduling else "--no-async-scheduling")
    return options


def _status_of_server(url: str, as_json: bool) -> NoReturn:
    from vllm_async_spec.vllm_plugin.ledger import summary
    from vllm_async_spec.vllm_plugin.server_status import ServerError, read_server

    try:
        found = read_server(url)
    except ServerError as error:
        fail(str(error), 2)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold")
        facts.add_column(overflow="fold")
        facts.add_row("vllm-async-spec", escape(f"{found.version}, on at {found.url}"))
        facts.add_row("VLLM_ASYNC_SPEC", escape(found.mode))
        facts.add_row("VLLM_ASYNC_SPEC_SYNC", escape(found.sync))
        facts.add_row("scheduling", escape(_scheduling(found)))
        facts.add_row("patches", summary(found.patches))
        for name, reason in found.refused.items():
            facts.add_row("[bold red]refused[/]", escape(f"{name}: {reason}"))
        Console().print(facts)
    raise typer.Exit(0 if found.healthy else 1)


def _scheduling(found: ServerStatus) -> str:
    if found.async_scheduling is None:
        return "unknown, because this server has an older plugin, or its engine has not started"
    state = f"asynchronous scheduling is {'on' if found.async_scheduling else 'off'}, decided by {found.decided_by}"
    return f"{state}; runner {found.runner}, attention {found.backend}"


def _print_status(found: Status) -> None:
    from vllm_async_spec.vllm_plugin.ledger import summary

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
    facts.add_row("runner", f"{found.runner}: {escape(found.runner_why)}" if found.runner_why else found.runner)
    if found.runner_refused is not None:
        facts.add_row("[red]runner refused[/]", escape(found.runner_refused))
    if found.alternative is not None:
        facts.add_row("another runner", escape(found.alternative))
    if found.backend is not None:
        facts.add_row("attention", found.backend)
    if found.graph_limit is not None:
        facts.add_row("CUDA graphs", escape(found.graph_limit))
    facts.add_row("scheduling", escape(found.scheduling))
    if found.remedy is not None:
        facts.add_row("to turn it on", escape(found.remedy))
    facts.add_row("patches", summary(found.counts))
    for name, setting in found.settings.items():
        facts.add_row(name, f"{setting['value']} ({setting['from']})")
    console.print(facts)
    if found.failure is not None:
        console.print(f"The plugin failed, so vLLM runs as stock: {escape(found.failure)}", style="red")
    if not found.loaded:
        console.print(f"{LEFT_OUT}.", style="red")
    table = Table(title="Patches", title_justify="left")
    for name in ("patch", "state", "why"):
        table.add_column(name, overflow="fold", no_wrap=name != "why")
    for patch in found.patches:
        table.add_row(patch.name, f"[{_STYLE[patch.state.value]}]{patch.state.value}[/]", escape(patch.detail))
    console.print(table)
