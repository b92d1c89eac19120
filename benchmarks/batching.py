"""Tokens a second of continuous batching: with and without waits, with and without drafts, and transformers' own.

    python -m benchmarks batching [--json FILE] [--model 8b] [--batch N] [--new-tokens N] [--passes N] [--drafts K]
        [--compile]

Arms take turns in one process, in the order ABCD DCBA, on one set of random weights:

- `synchronous`: `ContinuousBatcher`, which waits for each step before it plans the next;
- `synchronous again`: the same arm again; the difference is the noise;
- `asynchronous`: the same batcher, cache and CUDA graphs, without the wait;
- `transformers`: `ContinuousBatchingManager` of transformers, with asynchronous batching where that runs on the device;
- `drafts synchronous` and `drafts asynchronous`, with `--drafts`: another batcher on the same weights, with a draft
  model.

With `--compile` all our arms use compiled decodes of one size, so compilation does not change the ratios between them.

The model can't produce the end-of-sequence id, so each arm checks for it, and all generate equally many tokens. If the
tokens of our arms differ, there is no result. transformers uses other attention kernels, so the result has the share of
its tokens that are equal: with random weights in bfloat16, few are. With drafts all arms use the weights of
`batching_models`, whose next token is never a near tie.

A shorter, untimed run warms up each arm. On a GPU each arm has another short run afterwards, under CUPTI alone. Its
prompts are as long as sequences in the middle of a timed run. It gives the share of time in which a kernel or a copy
ran, and the share of host-caused idle: gaps of 3 µs and more. The rest is launch gaps. Both shares are of the
third quarter of the steps (transformers' arm: the middle half of the run). Each of our arms then runs once more with
the audit's recorder on the middle steps, which counts critical waits a step. `synchronous again` equals `synchronous`,
and is left out of both.

Kernels that FlashInfer has not compiled on this machine compile when a batcher is made (docs/batching.md).
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.arms import expected_length
from benchmarks.batching_arms import ARMS, DRAFTED, OURS, BatchingError, Say, make_arms
from benchmarks.batching_models import SHARE, make_drafter, make_model
from benchmarks.middle import MiddleError, Run, record_middle, shares_of_run, shares_of_steps
from benchmarks.present import Grid
from benchmarks.statistics import by_turns, paired_ratio, ratio_in_words, refusal
from vllm_async_spec.audit.report import Place

MODELS = ("tiny", "1b", "8b")
REFERENCES = ("synchronous", "transformers", "drafts synchronous")
"""Arms that others are compared with."""
_SHORTER_TOKENS = 128
"""New tokens of an untimed run: few, because the record of every kernel is written and read."""

Keep = Callable[[dict[str, Any]], None]
"""Takes the partial result file."""


def measure(
    *,
    size: str,
    device: str,
    batch: int,
    requests: int,
    prompt: int,
    new_tokens: int,
    passes: int,
    attention: str,
    arms: list[str],
    drafts: int = 0,
    compiled: bool = False,
    say: Say = lambda _: None,
    keep: Keep = lambda _: None,
) -> dict[str, Any]:
    """The result file; `drafts` is the number of drafts of each sequence and step, 0 if no arm drafts.

    After each pass, and after each recorded arm, `keep` gets the partial file, which is not `complete`.

    Raises:
        BatchingError: the model or an arm is unknown, arms and drafts don't match, there is no such device, or tokens
            of our arms differ.
    """
    import transformers

    if size not in MODELS:
        raise BatchingError(f"the model is {size!r}; it must be one of {', '.join(MODELS)}")
    if unknown := [name for name in arms if name not in (*ARMS, *DRAFTED)]:
        raise BatchingError(f"there is no arm {unknown[0]!r}; there are {', '.join((*ARMS, *DRAFTED))}")
    if any(name in DRAFTED for name in arms) != bool(drafts):
        raise BatchingError(
            f"the drafts are {drafts} and the arms {', '.join(arms)}; {' and '.join(DRAFTED)} need a number of drafts, "
            "and other arms take none"
        )
    on_gpu = device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise BatchingError(f"the device is {device!r}, and PyTorch finds no CUDA device; give --device cpu")
    say(f"making a model of {size}")
    model = make_model(size, device, arranged=bool(drafts))
    # Without the last token of an arranged vocabulary, after which any token may follow.
    vocabulary = model.config.vocab_size - bool(drafts)
    shorter = min(new_tokens, _SHORTER_TOKENS)
    # As long as sequences are in the middle of a timed run.
    longer = prompt + (new_tokens - shorter) // 2
    recorded = torch.randint(vocabulary, (requests, longer), generator=_generator()).tolist()
    prompts = [each[:prompt] for each in recorded]
    with contextlib.ExitStack() as stack:
        made = make_arms(
            stack,
            model,
            prompts,
            batch=batch,
            new_tokens=new_tokens,
            attention=attention,
            names=arms,
            drafter=make_drafter(size, device) if drafts else None,
            drafts=drafts,
            compiled=compiled,
            say=say,
        )
        warming = _Comparison(arms)
        needed = 0.0
        for name, run in made.runs.items():
            say(f"{name}: {shorter} tokens, not timed")
            start = time.perf_counter()
            warming.hold(name, run(shorter))
            needed += (time.perf_counter() - start) * new_tokens / shorter
        say(f"a pass, of two turns of {new_tokens} tokens for each arm, takes about {2 * needed:.0f} s")
        compared = _Comparison(arms)

        def turn(name: str) -> float:
            say(f"{name}: {new_tokens} tokens, timed")
            start = time.perf_counter()
            found = made.runs[name](new_tokens)  # returns when the host has all tokens, so nothing is left to wait for
            seconds = time.perf_counter() - start
            compared.hold(name, found)
            speed = sum(map(len, found)) / seconds
            say(f"{name}: {speed:.1f} tokens/s")
            return speed

        speeds: dict[str, list[float]] = {name: [] for name in arms}
        busy: dict[str, float] = {}
        idle: dict[str, float] = {}
        waits: dict[str, dict[str, float]] = {}
        unrecorded: dict[str, str] = {}

        def found_so_far(complete: bool = False) -> dict[str, Any]:
            return {
                "complete": complete,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(device) if on_gpu else device,
                "model": size,
                "batch": batch,
                "requests": requests,
                "prompt": prompt,
                "new_tokens": new_tokens,
                "attention": made.attention,
                "compiled": compiled,
                "tokens_per_second": speeds,
                "equal_tokens": compared.equal,
                "gpu_busy": busy,
                "host_idle": idle,
                "drafts": drafts,
                "accepted": {name: batcher.accepted for name, batcher in made.batchers.items()},
                "waits": waits,
                "unrecorded": unrecorded,
            }

        for number in range(passes):
            say(f"pass {number + 1} of {passes}")
            for name, values in by_turns(arms, 1, turn).items():
                speeds[name] += values
            keep(found_so_far())
        for name in [name for name in arms if name != ARMS[1]] if on_gpu else []:
            say(f"{name}: {shorter} tokens, to measure how busy the GPU is")
            if name in made.batchers:
                shares = shares_of_steps(functools.partial(made.stepping, name, shorter, others=recorded))
            else:
                shares = shares_of_run(functools.partial(made.runs[name], shorter, recorded))
            busy[name], idle[name] = shares.busy, shares.host_idle
            if name in made.batchers:
                say(f"{name}: {shorter} tokens twice, to record its waits")
                try:
                    waits[name] = _waits(functools.partial(made.stepping, name, shorter, others=recorded))
                except MiddleError as error:
                    unrecorded[name] = str(error)
            keep(found_so_far())
        return found_so_far(complete=True)


class _Comparison:
    """Compares each arm's tokens with those of the first of our arms, or of the first arm if none is ours."""

    def __init__(self, arms: list[str]) -> None:
        self._reference = next((name for name in arms if name in OURS), arms[0])
        self._tokens: dict[str, list[list[int]]] = {}

    @property
    def equal(self) -> dict[str, float]:
        """For each arm that has run, the share of tokens that equal the reference's."""
        expected = self._tokens[self._reference]
        return {name: _agreement(expected, found) for name, found in self._tokens.items()}

    def hold(self, name: str, found: list[list[int]]) -> None:
        """Take the tokens of a run.

        Raises:
            BatchingError: the arm is one of ours, and its tokens differ from those of its first run or the reference.
        """
        expected = self._tokens.setdefault(name, found)
        if name not in OURS:
            return
        if found != expected:
            raise BatchingError(
                f"a timed run of {name} generated other tokens than its first run, so speeds can't be compared"
            )
        if found != (tokens := self._tokens[self._reference]):
            raise BatchingError(
                f"{name} generates other tokens than {self._reference}, from token {_first_difference(tokens, found)} "
                "of a request on, so their speeds can't be compared"
            )


def table(found: Mapping[str, Any]) -> Table:
    """The same for the terminal: medians, spread, and ratios with their intervals."""
    title = (
        f"transformers {found['transformers']}, {found['device']}, {found['model']}, {found['requests']} requests, "
        f"batch {found['batch']}, {found['prompt']} prompt and {found['new_tokens']} new tokens"
    )
    references = [name for name in REFERENCES if name in found["tokens_per_second"]]
    return Grid(columns(references), list(rows(found, references))).table(title)


def columns(references: Sequence[str]) -> tuple[str, ...]:
    """Columns of a table whose arms are compared with these."""
    ratios = (f"{name} = 1" for name in references)
    return (
        "arm",
        "tokens/s",
        "spread",
        *ratios,
        "equal",
        "tokens a step",
        "critical waits",
        "GPU busy",
        "host-caused idle",
    )


def rows(found: Mapping[str, Any], references: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One for each arm, in the order of `columns`; arms are compared with those of `references` that ran."""
    speeds = found["tokens_per_second"]
    for name, values in speeds.items():
        against = [
            other in speeds and name != other and (other != DRAFTED[0] or name in DRAFTED) for other in references
        ]
        waits, accepted = found["waits"].get(name), found["accepted"].get(name)
        busy, idle = found["gpu_busy"].get(name), found.get("host_idle", {}).get(name)
        yield (
            name,
            f"{statistics.median(values):.1f}",
            f"{min(values):.1f}-{max(values):.1f}",
            *(
                ratio_in_words(speeds[other], values) if told else "-"
                for told, other in zip(against, references, strict=True)
            ),
            f"{found['equal_tokens'][name]:.1%}",
            "-" if accepted is None else f"{accepted:.2f}",
            "-" if waits is None else f"{waits[Place.CRITICAL]:.2f}",
            "-" if busy is None else f"{busy:.1%}",
            "-" if idle is None else f"{idle:.2%}",
        )


def notes(found: Mapping[str, Any]) -> list[str]:
    speeds = found["tokens_per_second"]
    said = [f"attention: {', '.join(f'{name} {used}' for name, used in found['attention'].items())}"]
    if drafts := found["drafts"]:
        said.append(
            f"a small Llama drafts {drafts} tokens a step. The weights of both models are arranged so that a draft "
            f"token is accepted with probability {SHARE} if all drafts before were accepted, which gives "
            f"{expected_length(SHARE, drafts):.2f} tokens a step. Each token then depends only on the token before, "
            "so equal tokens do not verify attention"
        )
    if found.get("compiled"):
        said.append("the decodes of this package's arms are compiled, for one batch size")
    if found["waits"]:
        said.append(
            "critical waits: how often a step the host waited until the GPU had nothing left to do, in the middle half "
            "of the steps of a recorded run. If a step ends before the host asks for its tokens, the GPU idles without "
            "a wait. `GPU busy`, from another run, shows such idle time too"
        )
    said += [f"the waits of {name} were not recorded: {reason}" for name, reason in found["unrecorded"].items()]
    if found["device"] == "cpu":
        said.append("a CPU shows no gain: host and device are the same")
    if "synchronous again" in speeds and "synchronous" in speeds:
        reason = refusal(paired_ratio(speeds["synchronous"], speeds["synchronous again"]))
        if reason:
            said.append(f"with `synchronous again` as the noop arm: {reason}")
    return said


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _waits(run: Run) -> dict[str, float]:
    """Waits a step of the launching thread, critical and overlapped."""
    middle = record_middle(run)
    return {place.value: middle.waits_a_step(place) for place in (Place.CRITICAL, Place.OVERLAPPED)}


def _agreement(expected: list[list[int]], found: list[list[int]]) -> float:
    pairs = [(a, b) for one, other in zip(expected, found, strict=True) for a, b in itertools.zip_longest(one, other)]
    return [a == b for a, b in pairs].count(True) / len(pairs)


def _first_difference(expected: list[list[int]], found: list[list[int]]) -> int:
    rows = zip(expected, found, strict=True)
    return min(index for a, b in rows for index, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y)
