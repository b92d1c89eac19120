"""`vllm-async-spec audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_async_spec.cli.common import LEFT_OUT, distinct_files, fail, output_file, refuse, write_outputs
from vllm_async_spec.cli.outputs import OutputError, check_file


def audit(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Start an engine with this model; engine arguments of `vllm serve` may follow.")
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
    rank: Annotated[int, typer.Option(min=0, max=4096, help="The worker to record, of several.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=output_file, help="Write the report to this JSON file.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", callback=output_file, help="Write the report to this HTML file.")
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace", callback=output_file, help="Write the timeline to this file, for Perfetto or chrome://tracing."
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="off: audit stock vLLM too, and show both.", metavar="off")
    ] = None,
    log: Annotated[Path, typer.Option(help="File for the engine's log.")] = Path("vllm-async-spec-audit.log"),
) -> None:
    """Find what makes the host wait for the GPU in a running engine: each line of code, how often, and for how long.

    Exit code 0: the audit was made; 1: the audit failed, or a file could not be written; 2: the command
    line has a mistake.
    """
    import torch

    from vllm_async_spec.audit.chrome_trace import NO_TIMES, chrome_trace
    from vllm_async_spec.audit.engine import AuditError
    from vllm_async_spec.audit.html import render_html
    from vllm_async_spec.audit.launch import audit_model, audit_server
    from vllm_async_spec.audit.loads import LoadError
    from vllm_async_spec.audit.terminal import print_report
    from vllm_async_spec.vllm_plugin.settings import left_out

    if (model is None) == (url is None):
        refuse("an audit needs either --model, to start an engine, or --url, to ask a running server; give one of them")
    if compare not in (None, "off"):
        refuse(f"--compare is {compare!r}; it must be off")
    _refuse_unused(context, url is not None, load is not None)
    if model is not None and trace_file is not None and not torch.cuda.is_available():
        refuse(NO_TIMES)
    try:
        if model is not None:
            check_file("--log", log)
    except OutputError as error:
        refuse(str(error))
    outputs = {"--json": json_file, "--html": html_file, "--trace": trace_file}
    distinct_files(outputs if model is None else {"--log": log, **outputs})
    if model is not None and left_out():
        fail(LEFT_OUT)
    errors = Console(stderr=True)
    before = None
    try:
        with errors.status("auditing the server") as status:
            if url is not None:
                found = audit_server(
                    url, load=load, batch=batch, steps=steps, seconds=seconds, api_key=api_key, rank=rank
                )
            else:
                arguments = ["--model", str(model), *context.args]
                options: dict[str, Any] = {"load": load or "decode", "batch": batch, "steps": steps, "rank": rank}
                if compare == "off":
                    before = audit_model(
                        arguments, **options, plugin=False, log=log, stage=lambda s: status.update(f"stock vLLM: {s}")
                    )
                found = audit_model(arguments, **options, plugin=True, log=log, stage=status.update)
    except LoadError as error:
        refuse(str(error))
    except AuditError as error:
        fail(str(error))
    texts: dict[str, tuple[Path, str]] = {}
    if json_file is not None:
        data = {"report": found.to_dict(), "before": None if before is None else before.to_dict()}
        texts["--json"] = json_file, json.dumps(data, indent=1)
    if html_file is not None:
        texts["--html"] = html_file, render_html(found, before)
    trace = None if trace_file is None else chrome_trace(found, before)
    if trace_file is not None and trace is not None:
        texts["--trace"] = trace_file, trace
    failed = write_outputs(texts)
    print_report(found, Console(), before)
    if trace_file is not None and trace is None:
        fail(NO_TIMES)
    raise typer.Exit(1 if failed else 0)


def _refuse_unused(context: typer.Context, server: bool, loaded: bool) -> None:
    """End the command if an argument has no effect on what is audited."""

    def given(*options: str) -> list[str]:
        sources = {each: context.get_parameter_source(each[2:].replace("-", "_")) for each in options}
        return [each for each, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]

    if server:
        unused, where, remedy = [*context.args, *given("--compare", "--log")], "a running server", "use --model"
        if not unused and not loaded:
            unused, where, remedy = given("--batch"), "a server's own traffic", "give --load"
    else:
        unused, where, remedy = given("--api-key", "--seconds"), "an engine that the audit starts", "use --url"
    if unused:
        said = " ".join(unused)
        refuse(f"{said} has no effect on {where}; leave out {said}, or {remedy}")
