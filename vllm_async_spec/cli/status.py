"""`vllm-async-spec status`: of this environment, of an engine with some arguments, or of a running server."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_async_spec.cli.common import AsJson, fail, json_object

_STYLE = {"applied": "green", "not needed": "dim", "refused": "bold red", "waiting": "yellow", "off": "dim"}


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
            fail(
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
            arguments["speculative_config"] = json_object("--speculative-config", speculative_config)
        if async_scheduling is not None:
            arguments["async_scheduling"] = async_scheduling
    elif speculative_config is not None or async_scheduling is not None:
        fail("--speculative-config and --async-scheduling have no effect without --model; add --model")
    try:
        found = read_status(arguments)
    except NoVllmError as error:
        fail(str(error), 2)
    except (SettingError, PatchError) as error:
        fail(str(error))
    except Exception as error:
        if model is None:
            raise
        fail(f"vLLM does not take these engine arguments: {' '.join(str(error).split())}")
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
        fail(str(error), 2)
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
