"""`vllm-async-spec compat`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from vllm_async_spec.cli.common import fail
from vllm_async_spec.compat.model_shapes import MODELS

if TYPE_CHECKING:
    from vllm_async_spec.compat.keep import KeptResults, Stopped
    from vllm_async_spec.compat.report import Report
    from vllm_async_spec.compat.results import BackendResult

_MODELS = (
    f"A model whose heads, sizes and windows the builders get; may be repeated. Default: the models that use a builder."
    f" There are {', '.join(MODELS)}."
)


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
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help=_MODELS),
    ] = None,
    plugin: Annotated[bool, typer.Option("--plugin", help="Apply the plugin's patches first.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all evidence to this JSON file, while the suite runs.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table to this Markdown file.")
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write a test for each batch to this JUnit file, for CI.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the table to this HTML file.")] = None,
    badge_file: Annotated[Path | None, typer.Option("--badge", help="Write the last line to this SVG badge.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 also if a builder is not shown clean.")] = False,
    forward_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds for the forwards of each backend.", show_default="600")
    ] = 600.0,
) -> None:
    """Check whether metadata builders make the host wait: without host lengths, with upper bounds, and with garbage.

    Exit code 0: no builder makes the host wait in a step, and each builds the right metadata; 1: a builder waits,
    fails, or builds wrong metadata, or with --strict is not shown clean; 2: a builder could not be tried.
    """
    from vllm_async_spec.compat.builder_inputs import SubjectError
    from vllm_async_spec.compat.keep import KeptResults, Stopped, stopped_by_signals
    from vllm_async_spec.compat.model_shapes import UnknownModelError
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
            fail(f"{option} is {str(path)!r}, whose directory does not exist; create the directory, or name another")
    console = Console(stderr=True)
    kept = KeptResults(json_file, lambda said: console.print(said, markup=False, highlight=False, soft_wrap=True))
    try:
        with stopped_by_signals(), console.status("") as status:
            found = _try(
                backends or [],
                plugin,
                device,
                vllm_source,
                status.update,
                models=models or (),
                keep=kept,
                forward_seconds=forward_seconds,
            )
    except (SubjectError, UnknownModelError, VllmSourceError) as error:
        kept.discard()
        fail(str(error), 2)
    except Stopped as stopped:
        _stop(stopped, kept)
    for path, make in written.values():
        if path is not None:
            path.write_text(make(found), encoding="utf-8")
    kept.discard()
    print_report(found, Console())
    unsure = strict and not all(result.shown_clean for result in found.results)
    raise typer.Exit(found.exit_code or int(unsure))


def _stop(stopped: Stopped, kept: KeptResults) -> NoReturn:
    """Print what was found until the signal, say where it is kept, and exit as a shell expects."""
    from vllm_async_spec.compat.render import print_report

    left = kept.stop()
    if left is None:
        fail(f"{stopped}; no batch was built", 128 + stopped.signal)
    report, path = left
    print_report(report, Console())
    names = {*report.not_tried, *(each.backend for each in report.results)}
    tried = f"{len(names) - len(report.not_tried)} of {len(names)} builders to the end"
    fail(f"{stopped}; the results so far, of {tried}, are in {path}", 128 + stopped.signal)


def _try(
    names: Sequence[str],
    plugin: bool,
    device: str = "cuda",
    vllm_source: Path | None = None,
    progress: Callable[[str], None] = lambda name: None,
    models: Sequence[str] = (),
    **how: Any,
) -> Report:
    """Run the suite in this process, which has imported no vLLM yet."""
    from vllm_async_spec.compat.model_shapes import models_named
    from vllm_async_spec.compat.suite import open_device, prepare, run

    models_named(models)  # a wrong name is told before vLLM is loaded
    source = prepare(vllm_source, plugin=plugin)
    opened = open_device(device, source)
    patches = _load_plugin() if plugin else None
    elsewhere = functools.partial(
        _try_elsewhere, plugin=plugin, models=models, forward_seconds=how.get("forward_seconds", 600.0)
    )
    return run(
        names, opened, models=models, source=source, patches=patches, progress=progress, elsewhere=elsewhere, **how
    )


def _try_elsewhere(
    names: Sequence[str], *, plugin: bool, models: Sequence[str], forward_seconds: float
) -> Sequence[BackendResult]:
    """Run the suite on the GPU in a spawned process with its own CUDA context."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_try, names, plugin, models=models, forward_seconds=forward_seconds).result().results


def _load_plugin() -> Callable[[], dict[str, str]]:
    """Apply the patches; the function returned gives the current state of each patch."""
    from vllm_async_spec.vllm_plugin.plugin import load

    ledger = load(report=False).ledger
    return lambda: {name: outcome.state.value for name, outcome in ledger.outcomes.items()} if ledger else {}
