"""`vllm-async-spec demo`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_async_spec.cli.common import AsJson, fail, refuse
from vllm_async_spec.cli.interrupts import exit_code
from vllm_async_spec.cli.outputs import OutputError, check_folder


def demo(
    as_json: AsJson = False,
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens a step.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens generated for each prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds whose speed counts, after the warm-up.")] = 4,
    cache: Annotated[
        Path | None, typer.Option(help="Directory for models and logs; default: ~/.cache/vllm-async-spec.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Your own target model; needs --draft.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Your own draft model, with the target's vocabulary.")] = None,
) -> None:
    """Serve one batch of prompts with vLLM in four ways, and check that all tokens are identical.

    The first run trains two small byte-level models; after an interruption the next run goes on. Progress goes to
    stderr, without a terminal as a line every few seconds.

    Exit code 0: all tokens are identical and the acceptance length does not fall; 1: otherwise, or the demo can't run;
    2: the command line has a mistake.
    """
    from vllm_async_spec.demo.compare import DemoError, compare
    from vllm_async_spec.demo.progress import shown_progress
    from vllm_async_spec.demo.terminal import print_comparison
    from vllm_async_spec.demo.train import DemoModels, prepare_models

    folder = cache or _default_cache()
    if (target is None) != (draft is None):
        refuse("--target and --draft go together; give both, or neither for the demo's own models")
    for option, path in (("--target", target), ("--draft", draft)):
        if path is not None and not (path / "config.json").is_file():
            refuse(f"{option} is {str(path)!r}, which has no config.json; give the directory of a model")
    try:
        check_folder("--cache", folder)
    except OutputError as error:
        refuse(str(error))
    with shown_progress(Console(stderr=True)) as progress:
        try:
            models = DemoModels(target, draft) if target and draft else prepare_models(folder, progress=progress)
        except OSError as error:
            fail(str(error))
        except ImportError as error:
            why = "install vLLM, which includes this module, as the documentation's page on installing says"
            fail(f"{error}; {why}")
        except KeyboardInterrupt as interrupt:
            fail(f"interrupted; the same command goes on from the last checkpoint in {folder}", exit_code(interrupt))
        try:
            found = compare(
                models,
                draft_tokens=draft_tokens,
                max_tokens=max_tokens,
                rounds=rounds,
                log_dir=folder / "logs",
                progress=progress,
            )
        except (DemoError, OSError) as error:
            fail(str(error))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_comparison(found, Console())
    for failure in found.failures:
        typer.echo(f"vllm-async-spec: {failure}", err=True)
    raise typer.Exit(1 if found.failures else 0)


def _default_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm-async-spec"
    except RuntimeError:  # neither HOME nor the user's entry among the passwords names one
        refuse("there is no home directory; give --cache DIR")
