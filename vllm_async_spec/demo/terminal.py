"""A demo's result for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vllm_async_spec.demo.compare import Comparison


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the table of a demo, and how to read it."""
    title = (
        f"vLLM {found.vllm} on {found.device}: {found.prompts} prompts, {found.max_tokens} tokens each, "
        f"{found.draft_tokens} draft tokens"
    )
    table = Table(title=title, title_justify="left")
    for name in ("way", "async", "tokens/s", "accepted", "host reads", "tokens"):
        table.add_column(name, justify="left" if name in ("way", "tokens") else "right")
    for result in found.results:
        low, high = result.spread
        acceptance = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
        table.add_row(
            result.way,
            "yes" if result.async_scheduling else "no",
            f"{result.tokens_per_second:.0f} ({low:.0f}-{high:.0f})",
            acceptance,
            f"{result.reads_now:.2f} + {result.reads_late:.2f}",
            "[green]identical[/]" if result.difference is None else f"[bold red]{result.difference}[/]",
        )
    console.print(table)
    console.print(
        f"Tokens/s: median of {found.rounds} interleaved rounds (lowest-highest). Accepted: mean tokens a step and "
        "request, with the target's own token. Host reads a step: blocking reads of the newest step + reads of the "
        "step before, while the device has work. Tokens: compared with the tokens of the first row.",
        style="dim",
    )
