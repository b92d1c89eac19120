"""`vllm-async-spec compat`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from vllm_async_spec.cli.common import distinct_files, fail, output_file, refuse, write_outputs
from vllm_async_spec.cli.interrupts import exit_code, signal_of
from vllm_async_spec.compat.model_shapes import MODELS
from vllm_async_spec.process_group import NewProcess

if TYPE_CHECKING:
    from vllm_async_spec.compat.keep import KeptResults
    from vllm_async_spec.compat.report import Report
    from vllm_async_spec.compat.results import BackendResult

_MODELS = (
    f"A model whose heads, sizes and windows the builders get; may be repeated. Default: the models that use a builder."
    f" There are {', '.join(MODELS)}."
)
_FORWARD_SECONDS = 600.0


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
        Path | None,
        typer.Option(
            "--json", callback=output_file, help="Write all evidence to this JSON file, while the suite runs."
        ),
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", callback=output_file, help="Write the table to this Markdown file.")
    ] = None,
    junit_file: Annotated[
        Path | None,
        typer.Option("--junit", callback=output_file, help="Write a test for each batch to this JUnit file, for CI."),
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", callback=output_file, help="Write the table to this HTML file.")
    ] = None,
    badge_file: Annotated[
        Path | None, typer.Option("--badge", callback=output_file, help="Write the last line to this SVG badge.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 also if a builder is not shown clean.")] = False,
    forward_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds for the forwards of each backend.", show_default="600")
    ] = _FORWARD_SECONDS,
) -> None:
    """Check whether metadata builders make the host wait: without host lengths, with upper bounds, and with garbage.

    Exit code 0: no builder makes the host wait in a step, and each builds the right metadata; 1: a builder waits,
    fails, or builds wrong metadata, or with --strict is not shown clean; 2: a builder could not be tried, a file could
    not be written, or the command line has a mistake.
    """
    from vllm_async_spec.compat.builder_inputs import SubjectError
    from vllm_async_spec.compat.keep import KeptResults
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
    distinct_files({option: path for option, (path, _) in written.items()})
    if plugin:
        _insist_on_the_plugin()
    console = Console(stderr=True)
    kept = KeptResults(json_file, lambda said: console.print(said, markup=False, highlight=False, soft_wrap=True))
    try:
        with console.status("") as status:
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
    except KeyboardInterrupt as interrupt:  # which no builder's `except Exception` catches
        _stop(f"stopped by {signal_of(interrupt).name}", exit_code(interrupt), kept)
    except OSError as error:  # other than a builder's; such as of a model's directory, which vLLM reads
        what = "stopped, because a file that the suite needs can't be written or read"
        _stop(f"{what} ({error}); free space, or set TMPDIR to a directory that can be written", 2, kept)
    failed = write_outputs({option: (path, make(found)) for option, (path, make) in written.items() if path})
    kept.discard()
    print_report(found, Console())
    unsure = strict and not all(result.shown_clean for result in found.results)
    raise typer.Exit(found.exit_code or (2 if failed else int(unsure)))


def _stop(why: str, code: int, kept: KeptResults) -> NoReturn:
    """Print what was found so far, say why the run stopped and where the results are kept, and exit with `code`."""
    from vllm_async_spec.compat.render import print_report

    left = kept.stop()
    if left is None:
        fail(f"{why}; no batch was built", code)
    report, path = left
    print_report(report, Console())
    names = {*report.not_tried, *(each.backend for each in report.results)}
    tried = f"{len(names) - len(report.not_tried)} of {len(names)} builders to the end"
    where = "are not kept" if path is None else f"are in {path}"
    fail(f"{why}; the results so far, of {tried}, {where}", code)


def _try(
    names: Sequence[str],
    plugin: bool,
    device: str = "cuda",
    vllm_source: Path | None = None,
    progress: Callable[[str], None] = lambda name: None,
    models: Sequence[str] = (),
    *,
    keep: Callable[[Callable[[], Report]], None] = lambda so_far: None,
    forward_seconds: float = _FORWARD_SECONDS,
) -> Report:
    """Run the suite in this process, which has imported no vLLM yet, and where it must in a second one."""
    from vllm_async_spec.compat.installed import distinct, divide, joined
    from vllm_async_spec.compat.model_shapes import models_named
    from vllm_async_spec.compat.suite import open_device, own_settings, prepare, run

    names = distinct(names)
    models_named(models)  # a wrong name is told before vLLM is loaded
    division = divide(names, device, vllm_source)
    with _second_process() as second, own_settings({}):
        # Started first, since this process sets variables that are not meant for the other.
        there = functools.partial(_try, models=models, forward_seconds=forward_seconds)
        beside = second.submit(there, division.beside, plugin, device) if division.beside else None
        source = prepare(division.source or vllm_source, plugin=plugin)
        opened = open_device(device, source)
        found = run(
            names,
            opened,
            models=models,
            source=source,
            patches=_load_plugin() if plugin else None,
            progress=progress,
            elsewhere=functools.partial(_try_elsewhere, plugin=plugin, models=models, forward_seconds=forward_seconds),
            left_out=division.beside,
            keep=keep,
            forward_seconds=forward_seconds,
        )
        if beside is None:
            return found
        progress(", ".join(division.beside))
        return joined(found, beside.result(), names)


def try_in_new_process(name: str, device: str) -> BackendResult:
    """Try one builder of `--backend` in a new process, for a caller that has imported vLLM or is about to.

    Raises:
        SubjectError: The name can't be checked.
    """
    with _second_process() as process:
        return process.submit(_try, [name], False, device).result().results[0]


def _try_elsewhere(
    names: Sequence[str], *, plugin: bool, models: Sequence[str], forward_seconds: float
) -> Sequence[BackendResult]:
    """Run the suite on the GPU in a spawned process with its own CUDA context."""
    with _second_process() as process:
        return process.submit(_try, names, plugin, models=models, forward_seconds=forward_seconds).result().results


def _second_process() -> NewProcess:
    """Runs what is submitted in a process that imports everything anew, and ends with this process."""
    return NewProcess()


def _insist_on_the_plugin() -> None:
    """End the command if a setting leaves the plugin off, or can't be read."""
    from vllm_async_spec.vllm_plugin.settings import Mode, SettingError, Settings

    try:
        mode = Settings.read().mode
    except SettingError as error:
        refuse(str(error))
    if mode is Mode.OFF:
        refuse("--plugin has no effect while VLLM_ASYNC_SPEC is 'off'; unset the variable, or leave out --plugin")


def _load_plugin() -> Callable[[], dict[str, str]]:
    """Apply the patches; the function returned gives the current state of each patch."""
    from vllm_async_spec.vllm_plugin.plugin import load

    ledger = load(report=False).ledger
    return lambda: {name: outcome.state.value for name, outcome in ledger.outcomes.items()} if ledger else {}
