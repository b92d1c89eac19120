"""Commands that measure one thing each, and those of transformers; each imports what it measures when it runs."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.common import command_line, failing, output_file, tell, write, write_json

app = typer.Typer()
_Json = Annotated[Path | None, typer.Option("--json", callback=output_file, help="Write the result to this file too.")]
_Device = Annotated[str, typer.Option(help="cuda or cpu; if unset, cuda where available.")]
_Rounds = Annotated[int, typer.Option(min=2, help="Rounds, half of them in each order.")]


@app.command()
def trace(
    technique: Annotated[str, typer.Argument(help="stopping, static, interleaving or batching.")],
    out: Annotated[
        Path, typer.Option(metavar="FILE.json", callback=output_file, help="File for the timeline, which `plot` draws.")
    ],
    model: Annotated[str, typer.Option(help="Model size, with random weights; the technique's default if unset.")] = "",
    batch: Annotated[int, typer.Option(min=0, help="Sequences; the technique's default if 0.")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=20, help="Steps shown for each arm.")] = 3,
    drafts: Annotated[int, typer.Option(min=0, help="Draft tokens of each sequence and step, for batching only.")] = 0,
) -> None:
    """Record a few decode steps of a technique on a GPU, with and without its wait."""
    from benchmarks.tracing import TraceError, as_text, record
    from vllm_async_spec.generation.batching import AttentionChoiceError

    with failing(AttentionChoiceError, TraceError):
        found = record(technique, size=model, batch=batch, steps=steps, drafts=drafts, command=command_line())
    write("--out", out, as_text(found))
    for name, arm in found["arms"].items():
        typer.echo(f"{name}: {arm['step_us']} µs a step, {arm['critical_waits']} critical waits a step, while recorded")
    typer.echo(f"written to {out}")


@app.command()
def host_time(
    json_file: _Json = None,
    rounds: _Rounds = 20,
) -> None:
    """Measure the host time that the plugin adds to constructing vLLM's attention metadata."""
    from benchmarks.host_time import measure, table

    found = measure(rounds)
    tell(found, table(found), json_file=json_file)


@app.command()
def held(
    json_file: _Json = None,
    times: Annotated[int, typer.Option(min=1, help="Measurements of each call.")] = 20,
) -> None:
    """Measure how long single calls of a step hold the host while the device is busy."""
    from benchmarks.held import measure, table

    with failing():
        found = measure(times)
    tell(found, table(found), json_file=json_file)


@app.command()
def kernels(
    json_file: _Json = None,
    tokens: Annotated[int, typer.Option(min=2, max=32, help="Query tokens of each request.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads, of 32 query heads.")] = 8,
) -> None:
    """Measure how long kernels take to verify drafts, each alone and in a layer, on a Hopper GPU."""
    from benchmarks.kernels import KernelError, measure, table

    with failing(KernelError):
        found = measure(tokens, kv_heads)
    tell(found, table(found), json_file=json_file)


@app.command()
def plan_time(
    json_file: _Json = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each, every builder has two turns.")] = 5,
) -> None:
    """Measure the host time of a step's FlashInfer metadata with vLLM's builder and the plugin's, on a GPU."""
    from benchmarks.plan_time import measure, table
    from vllm_async_spec.compat.suite import prepare

    prepare(None)
    with failing():
        found = measure(rounds)
    tell(found, table(found), json_file=json_file)


@app.command()
def step_time(
    json_file: _Json = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 32,
    rounds: _Rounds = 20,
) -> None:
    """Measure the host time that the optimistic runner of vLLM 0.14 to 0.18 adds to a step, and saves."""
    from benchmarks.step_time import measure, table

    with failing():
        found = measure(batch, rounds)
    tell(found, table(found), json_file=json_file)


@app.command()
def generation(
    json_file: _Json = None,
    model: Annotated[str, typer.Option(help="tiny, gpt2 or medium, with random weights.")] = "tiny",
    device: _Device = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each sequence.")] = 200,
    passes: Annotated[int, typer.Option(min=1, help="Passes; in each, every arm has two turns.")] = 10,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Run the arms with torch.compile too, on a GPU.")
    ] = True,
    arms: Annotated[str, typer.Option(help="Arms, separated by commas; all but the tuned arms if unset.")] = "",
) -> None:
    """Compare transformers' generate with and without waits for stop checks, and this package's decode loop."""
    import torch

    from benchmarks.generation import ARMS, COMPILED, GenerationError, measure, notes, table

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    every = [*ARMS, *(COMPILED if compiled and chosen.startswith("cuda") else [])]
    names = _named(arms, every)
    with failing(GenerationError):
        found = measure(size=model, device=chosen, batch=batch, new_tokens=new_tokens, passes=passes, arms=names)
    tell(found, table(found), notes(found), json_file)


@app.command()
def batching(
    json_file: _Json = None,
    model: Annotated[str, typer.Option(help="tiny, 1b or 8b, with random weights.")] = "tiny",
    device: _Device = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 32,
    requests: Annotated[int, typer.Option(min=0, help="Sequences in total; one batch if 0.")] = 0,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each sequence.")] = 64,
    passes: Annotated[int, typer.Option(min=1, help="Passes; in each, every arm has two turns.")] = 3,
    attention: Annotated[str, typer.Option(help="The batcher's option `attention`.")] = "auto",
    arms: Annotated[str, typer.Option(help="Arms, separated by commas; all if unset.")] = "",
    drafts: Annotated[
        int, typer.Option(min=0, help="Draft tokens of each sequence and step, for arms with a draft model.")
    ] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the decodes of this package's arms.")] = False,
) -> None:
    """Compare continuous batching with and without waits for steps and draft models, and transformers' own.

    Progress goes to stderr. The result file is written after each pass, and says whether the measurement is complete.
    """
    import torch

    from benchmarks.batching import measure, notes, table
    from benchmarks.batching_arms import ARMS, DRAFTED, BatchingError
    from vllm_async_spec.generation.batching import AttentionChoiceError

    with failing(AttentionChoiceError, BatchingError):
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
            keep=lambda so_far: write_json(so_far, json_file),
        )
    tell(found, table(found), notes(found), json_file)


def _named(arms: str, otherwise: Sequence[str]) -> list[str]:
    """The arms that `--arms` names; `otherwise` if unset."""
    return [name.strip() for name in arms.split(",")] if arms else list(otherwise)


def _progress() -> Callable[[str], None]:
    """A function that prints a line of progress on stderr, with the seconds since this call."""
    start = time.monotonic()
    return lambda line: typer.echo(f"{time.monotonic() - start:6.1f} s: {line}", err=True)
