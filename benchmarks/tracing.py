"""A few decode steps of a technique, with its wait and without, as rows of blocks for the timeline of `plot`.

    python -m benchmarks trace TECHNIQUE --out FILE.json [--model SIZE] [--batch N] [--steps N] [--drafts K]

Both arms run in one process on one set of random weights. A block is a stretch of time in which a row did one thing;
stretches nearer to each other than `join_us` are one block. The step times and shares beside the rows cover all
recorded steps and ignore the joining. Recording makes steps longer, above all steps with many launches.
"""

import contextlib
import functools
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.arms import expected_length
from benchmarks.batching_arms import Arms, make_arms
from benchmarks.batching_models import SHARE, make_drafter, make_model
from benchmarks.machine import MachineError
from benchmarks.middle import Middle, MiddleError, OnStep, Run, before_each, record_middle
from benchmarks.shapes import SHAPES
from vllm_async_spec.audit.device_trace import DeviceTrace, cupti_thread
from vllm_async_spec.audit.recorded import Recorded
from vllm_async_spec.audit.report import Place

ARMS = ("synchronous", "asynchronous")
CALL, CRITICAL, OVERLAPPED = "call", "critical", "overlapped"
"""Blocks of the host: in a CUDA call, in a critical wait, in an overlapped wait."""
KERNELS, COPIES = "kernels", "copies"
"""Blocks of a stream."""
LARGEST = 10_000
"""Most bytes of a file, because files are committed."""

_JOIN_US = 1.0
_RECORDED = 24
_NEW_TOKENS = 96
_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Technique:
    title: str
    sizes: tuple[str, ...]
    """The first is the default."""
    batch: int


TECHNIQUES = {
    "stopping": Technique("The stop check of transformers' loop", ("tiny", "gpt2"), 1),
    "static": Technique("transformers' loop with a static cache", ("tiny", "gpt2"), 1),
    "interleaving": Technique("The stop check of the interleaved loop", ("tiny", "gpt2"), 1),
    "batching": Technique("Continuous batching", ("1b", "tiny", "8b"), 32),
}


class TraceError(RuntimeError):
    """This trace can't be made; the message says why."""


def record(
    technique: str, *, size: str = "", batch: int = 0, steps: int = 3, drafts: int = 0, command: str = ""
) -> dict[str, Any]:
    """The file's content; `size` and `batch` default to the technique's.

    Raises:
        TraceError: the technique or the size is unknown, there is no GPU, `drafts` are not for this technique, or the
            arms differ in their tokens.
    """
    import transformers

    if technique not in TECHNIQUES:
        raise TraceError(f"the technique is {technique!r}; it must be one of {', '.join(TECHNIQUES)}")
    chosen = TECHNIQUES[technique]
    size, batch = size or chosen.sizes[0], batch or chosen.batch
    if size not in chosen.sizes:
        raise TraceError(f"the model is {size!r}; of {technique} it must be one of {', '.join(chosen.sizes)}")
    if drafts and technique != "batching":
        raise TraceError(
            f"drafts are {drafts} and the technique is {technique}; only batching uses drafts; leave out --drafts"
        )
    if not torch.cuda.is_available():
        raise MachineError(
            "a trace needs a GPU, and PyTorch finds no CUDA device; record on a machine with a GPU, and plot here"
        )
    with contextlib.ExitStack() as stack:
        runs = make_runs(technique, stack, size=size, batch=batch, device="cuda", drafts=drafts)
        try:
            middles = {name: record_middle(run, at_most=_RECORDED) for name, run in runs.items()}
        except MiddleError as error:
            raise TraceError(str(error)) from error
    about = {
        "trace": technique,
        "title": chosen.title + (f", {drafts} drafts a step" if drafts else ""),
        "model": size,
        "batch": batch,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "command": command,
    }
    return reduced(about, middles, steps)


def make_runs(
    technique: str, stack: contextlib.ExitStack, *, size: str, batch: int, device: str, drafts: int
) -> dict[str, Run]:
    """Both arms of a technique, after one run of each that gave the same tokens.

    Raises:
        TraceError: the tokens differ.
    """
    make = _make_batching if technique == "batching" else functools.partial(_make_generation, technique)
    runs = make(stack, size=size, batch=batch, device=device, drafts=drafts)
    tokens = {name: run(lambda: None) for name, run in runs.items()}
    if tokens[ARMS[0]] != tokens[ARMS[1]]:
        raise TraceError(
            "the asynchronous arm generates other tokens than the synchronous arm, so the arms can't be compared"
        )
    return runs


def reduced(about: dict[str, Any], middles: dict[str, Middle], steps: int) -> dict[str, Any]:
    """`about`, and the middle steps of each arm as rows of blocks, joined until they fit into `LARGEST` bytes."""
    join_us = _JOIN_US
    while True:
        arms = {name: _arm(middle, steps, join_us) for name, middle in middles.items()}
        found = about | {"join_us": join_us, "arms": arms}
        if len(as_text(found)) <= LARGEST:
            return found
        join_us *= 1.5


def as_text(found: dict[str, Any]) -> str:
    """The result of `record` as compact JSON."""
    return json.dumps(found, separators=(",", ":")) + "\n"


def _make_generation(
    technique: str, stack: contextlib.ExitStack, *, size: str, batch: int, device: str, drafts: int
) -> dict[str, Run]:
    from benchmarks import generation
    from vllm_async_spec.generation.decode import Decode

    model = generation.make_model(size, device)
    made = generation.make_arms(dict.fromkeys(("interleaved", "static"), model), device, batch, _NEW_TOKENS)
    # A step begins where its forward is launched: transformers' loop calls the model, ours may replay a graph. A
    # compiled forward is not patched; there a step begins at the condition of transformers' loop.
    names, owner, name = {
        "stopping": (("synchronous", "asynchronous"), model, "forward"),
        "static": (("static", "static asynchronous"), model, "_has_unfinished_sequences"),
        "interleaving": (("graphs", "interleaved"), Decode, "launch"),
    }[technique]

    def run(arm: generation.Arm, on_step: OnStep) -> list[list[int]]:
        with before_each(owner, name, on_step):
            tokens: list[list[int]] = arm().tolist()
        return tokens

    return {arm: functools.partial(run, made[name]) for arm, name in zip(ARMS, names, strict=True)}


def _make_batching(stack: contextlib.ExitStack, *, size: str, batch: int, device: str, drafts: int) -> dict[str, Run]:
    model = make_model(size, device, arranged=bool(drafts))
    vocabulary = SHAPES[size].target["vocab_size"] - 1
    prompts = torch.randint(vocabulary, (batch, _PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    names = [f"drafts {name}" if drafts else name for name in ARMS]
    # A step with drafts gives more tokens, so as many steps need more tokens.
    new_tokens = math.ceil(_NEW_TOKENS * expected_length(SHARE, drafts))
    made: Arms = make_arms(
        stack,
        model,
        prompts,
        batch=batch,
        new_tokens=new_tokens,
        attention="auto",
        names=names,
        drafter=make_drafter(size, device) if drafts else None,
        drafts=drafts,
    )
    return {arm: functools.partial(made.stepping, name, new_tokens) for arm, name in zip(ARMS, names, strict=True)}


def _arm(middle: Middle, steps: int, join_us: float) -> dict[str, Any]:
    recorded = middle.recorded
    assert recorded.trace is not None
    shown = min(steps, recorded.count)
    first = (recorded.count - shown) // 2
    start, end = recorded.steps[first], recorded.steps[first + shown]
    window = _Window(start, end, round(join_us * 1e3))
    edges = np.diff(recorded.steps) / 1e3
    return {
        "us": _us(end - start),
        "steps_us": [_us(step - start) for step in recorded.steps[first : first + shown]],
        "recorded_steps": recorded.count,
        "step_us": round(statistics.median(edges.tolist()), 1),
        "gpu_busy": round(middle.busy(), 4),
        "critical_waits": round(middle.waits_a_step(Place.CRITICAL), 3),
        "overlapped_waits": round(middle.waits_a_step(Place.OVERLAPPED), 3),
        "rows": [_host(recorded, recorded.trace, window), *_streams(recorded.trace, window)],
    }


Stretch = tuple[int, int]
"""From and to, in nanoseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Window:
    start: int
    end: int
    join_ns: int

    def shows(self, stretch: Stretch) -> bool:
        return stretch[1] > self.start and stretch[0] < self.end

    def blocks(self, stretches: Iterable[Stretch]) -> list[list[float]]:
        """Start and length of each block, in microseconds from the start of the window."""
        return [
            [_us(max(a, self.start) - self.start), _us(min(b, self.end) - max(a, self.start))]
            for a, b in joined(stretches, self.join_ns)
            if self.shows((a, b))
        ]


def joined(stretches: Iterable[Stretch], within: int) -> Iterator[Stretch]:
    """Stretches by start, merged where the next begins less than `within` after the end of those before."""
    begun: Stretch | None = None
    for a, b in sorted(stretches):
        if begun is not None and a - begun[1] < within:
            begun = (begun[0], max(begun[1], b))
        else:
            if begun is not None:
                yield begun
            begun = (a, b)
    if begun is not None:
        yield begun


def _host(recorded: Recorded, trace: DeviceTrace, window: _Window) -> dict[str, Any]:
    thread = cupti_thread(recorded.main)
    waits: dict[Place, list[Stretch]] = {Place.CRITICAL: [], Place.OVERLAPPED: []}
    for wait in recorded.waits:
        if wait.thread == recorded.main:
            waits[wait.place].append((wait.start, wait.end))
    waiting = [*waits[Place.CRITICAL], *waits[Place.OVERLAPPED]]
    calls = [
        (call.start, call.end)
        for call in trace.calls
        if call.thread == thread and not any(a <= call.start < b for a, b in waiting)
    ]
    blocks = {
        CALL: window.blocks(calls),
        CRITICAL: window.blocks(waits[Place.CRITICAL]),
        OVERLAPPED: window.blocks(waits[Place.OVERLAPPED]),
    }
    return {"name": "host", "blocks": {kind: found for kind, found in blocks.items() if found}}


def _streams(trace: DeviceTrace, window: _Window) -> Iterator[dict[str, Any]]:
    """One row for each stream, ordered by first block."""
    shown = (trace.end > window.start) & (trace.start < window.end)
    for stream in dict.fromkeys(trace.stream[shown].tolist()):
        blocks = {}
        for kind, copies in ((KERNELS, False), (COPIES, True)):
            chosen = np.flatnonzero(shown & (trace.stream == stream) & (trace.is_copy == copies)).tolist()
            if found := window.blocks((int(trace.start[index]), int(trace.end[index])) for index in chosen):
                blocks[kind] = found
        yield {"name": f"stream {stream}", "blocks": blocks}


def _us(nanoseconds: int) -> int:
    """Whole microseconds: a figure's pixel has several."""
    return round(nanoseconds / 1e3)
