"""A demo's result for the terminal, in at most 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vllm_async_spec.demo.compare import Comparison

_WIDTH = 80


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the table of a demo, and how to read it."""
    width = min(_WIDTH, console.width)
    console.print(
        f"vLLM {found.vllm} on {found.device}: {found.prompts} prompts, {found.max_tokens} tokens each, "
        f"{found.draft_tokens} draft tokens",
        style="italic",
        highlight=False,
        width=width,
    )
    table = Table(show_edge=False, pad_edge=False)
    for name in ("way", "async", "tokens/s", "accepted", "host reads", "tokens"):
        table.add_column(name, justify="left" if name in ("way", "tokens") else "right", no_wrap=True)
    for result in found.results:
        speed = f"{result.tokens_per_second:.0f}"
        acceptance = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
        table.add_row(
            result.way,
            "yes" if result.async_scheduling else "no",
            f"{speed} ±{result.deviation:.0%}" if found.steady else f"~{speed}",
            acceptance,
            f"{result.reads_now:.2f} + {result.reads_late:.2f}",
            "[green]identical[/]" if result.difference is None else "[bold red]differ[/]",
        )
    console.print()
    console.print(table, width=width)
    console.print()
    run = found.warm_up + found.rounds
    counted = ", ± the furthest of these" if found.steady else ""
    left_out = "are warm-up" if found.steady else "do not count"
    console.print(
        f"Tokens/s: median of the last {found.rounds} of {run} interleaved rounds{counted}. The first {found.warm_up} "
        f"{left_out}. Accepted: mean tokens a step and request, with the target's own token. Host reads a step: "
        "blocking reads of the newest step + reads of the step before, while the device has work. Tokens: of all "
        "rounds, compared with the tokens of the first row.",
        style="dim",
        highlight=False,
        width=width,
    )
    if not found.steady:
        console.print(
            f"Tokens/s are no result: after {run} rounds they still vary, so something else uses this machine. The "
            "tokens and the host reads do not depend on that.",
            style="yellow",
            highlight=False,
            width=width,
        )
