"""Requests served repeatedly under random arrivals and random device delays, each compared with stock's tokens.

Delays put the device behind the host, so that a buffer reused too early, or a length read too soon, changes tokens.
"Soaks" in docs/benchmarks.md explains near ties. A soak of stock itself shows how close such tokens are: see
`soaks.Soak.noisy`.
"""

import copy
import inspect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.loads import Request
from benchmarks.soak.delays import builders

NEAR = 0.05
"""Two tokens this close, in log-probability, may be swapped by the order of additions: float16, logits spread by 1."""

NOTED = 0.5
"""Largest distance behind the chosen token, in log-probability, at which another token is recorded."""
GAPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, NOTED)
CHOICES = 5
"""Number of most likely tokens requested, including the chosen token."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Stock's answer to one request: its tokens, and at each place how far other tokens were behind."""

    tokens: list[int]
    behind: list[dict[str, float]]
    """By token, in log-probability: those of the next four tokens within `NOTED`."""

    def compare(self, tokens: Sequence[int], near: float = NEAR) -> tuple[str, int, float | None]:
        """`same`, `swapped` or `different`; the first place that differs; how far behind this token was, if known."""
        if list(tokens) == self.tokens:
            return "same", len(self.tokens), None
        pairs = enumerate(zip(tokens, self.tokens, strict=False))
        place = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
        if place is None or len(tokens) != len(self.tokens):
            return "different", min(len(tokens), len(self.tokens)), None
        behind = self.behind[place].get(str(tokens[place]))
        return "swapped" if behind is not None and behind <= near else "different", place, behind


@dataclass(slots=True)
class Verdict:
    """The result of all requests so far."""

    near: float = NEAR
    """Two tokens this close may be swapped."""
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("same", "swapped", "different"), 0))
    tokens: int = 0
    widest_swap: float = 0.0
    """Largest distance, in log-probability, of a `swapped` token behind stock's."""
    first_different: list[tuple[int, int, float | None]] = field(default_factory=list)
    """Up to ten: the request's index, the place, and how far behind the token was, if recorded."""
    gaps: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*map(str, GAPS), "more"), 0))
    """Requests that differ, by how far behind their first differing token was: up to this key, and above the key
    before it. `more` includes tokens that were not recorded."""

    def add(self, index: int, expected: Expected, tokens: Sequence[int]) -> None:
        """Judge one finished request."""
        outcome, place, behind = expected.compare(tokens, self.near)
        self.outcomes[outcome] += 1
        self.tokens += len(tokens)
        if outcome != "same":
            self.gaps[next((str(gap) for gap in GAPS if behind is not None and behind <= gap), "more")] += 1
        if outcome == "swapped" and behind is not None:
            self.widest_swap = max(self.widest_swap, behind)
        if outcome == "different" and len(self.first_different) < 10:
            self.first_different.append((index, place, behind))


def expect(llm: Any, requests: Sequence[Request], sampling: Callable[..., Any]) -> list[Expected]:
    """The answers of `llm`, a `vllm.LLM`, to the requests, with the tokens close behind."""
    prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    outputs = llm.generate(
        prompts, [sampling(request.max_tokens, logprobs=CHOICES) for request in requests], use_tqdm=False
    )
    return [expected_of(output.outputs[0]) for output in outputs]


def expected_of(output: Any) -> Expected:
    """The answer in one output of vLLM with log-probabilities."""
    tokens = [int(token) for token in output.token_ids]
    behind = []
    for token, choices in zip(tokens, output.logprobs, strict=True):
        gaps = {other: choices[token].logprob - choice.logprob for other, choice in choices.items() if other != token}
        behind.append({str(other): round(gap, 4) for other, gap in gaps.items() if gap <= NOTED})
    return Expected(tokens, behind)


def soak(
    llm: Any,
    requests: Sequence[Request],
    expected: Sequence[Expected],
    sampling: Callable[..., Any],
    *,
    running: int,
    seconds: float,
    seed: int,
    near: float = NEAR,
) -> Verdict:
    """Serve the requests in random order, arriving at random, until `seconds` have passed and each was served once."""
    source, engine, verdict = random.Random(seed), llm.llm_engine, Verdict(near)
    in_flight: dict[str, int] = {}
    begun, served, order = time.monotonic(), 0, list(range(len(requests)))
    source.shuffle(order)
    while True:
        late = time.monotonic() - begun > seconds and served >= len(requests)
        # Between bursts the batch runs dry, so that every batch size occurs.
        room = 0 if late else source.choice((0, 0, 0, 1, 1, 2, running))
        while room and len(in_flight) < running:
            index = order[served % len(order)]
            name = f"soak-{served}"
            engine.add_request(
                name, {"prompt_token_ids": list(requests[index].prompt)}, sampling(requests[index].max_tokens)
            )
            in_flight[name], served, room = index, served + 1, room - 1
        if not in_flight:
            if late:
                return verdict
            continue
        for output in engine.step():
            if output.finished:
                index = in_flight.pop(output.request_id)
                verdict.add(index, expected[index], output.outputs[0].token_ids)


def runner_of(llm: Any) -> Any:
    """The model runner of an engine whose core and worker are in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _no_lengths(runner: Any) -> None:
    """The device does not correct what FlashInfer planned from the upper bound."""
    from vllm_async_spec.vllm_plugin.patches import flashinfer_builder

    flashinfer_builder.__dict__["write_exact_lengths"] = lambda *_: None


def _no_fence(runner: Any) -> None:
    """A plan's pinned buffer is filled again at once, whether or not its copy has run."""
    from vllm_async_spec.attention.flashinfer import PlanBuffers

    for name in ("lend", "planned"):
        setattr(PlanBuffers, name, lambda *_: None)


def _short(runner: Any) -> None:
    """Each builder gets lengths that are one token too short; the tensors that a CUDA graph reads stay the same."""
    import torch

    def shortened(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *rest: Any, **more: Any) -> Any:
            given = copy.copy(common_attn_metadata)
            given.seq_lens = (given.seq_lens - 1).clamp(min=1)
            if any(base.__name__.startswith("MLA") for base in type(self).__mro__):
                # At least the query length, because MLA's prefill path takes the difference as the context length.
                given.seq_lens = torch.maximum(given.seq_lens, given.query_start_loc.diff())
            return original(self, common_prefix_len, given, *rest, **more)

        return build

    for builder in builders(runner):
        builder.build = shortened(builder.build)


def _stale_states(runner: Any) -> None:
    """Each builder of linear attention is told that one token was accepted, so states of older tokens go on."""

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(
            self: Any, common_prefix_len: int, common_attn_metadata: Any, accepted: Any = None, *rest: Any, **more: Any
        ) -> Any:
            accepted = more.pop("num_accepted_tokens", accepted)
            ones = None if accepted is None else accepted.new_ones(accepted.shape)
            return original(self, common_prefix_len, common_attn_metadata, ones, *rest, **more)

        return build

    for builder in builders(runner):
        if "num_accepted_tokens" in inspect.signature(builder.build).parameters:
            builder.build = told(builder.build)


def _short_on_last_rank(runner: Any) -> None:
    """As `_short`, on the last tensor-parallel rank alone, so that ranks disagree."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    if get_tensor_model_parallel_rank() == get_tensor_model_parallel_world_size() - 1:
        _short(runner)


def _no_positions(runner: Any) -> None:
    """The device does not correct inputs that the runner of 0.14 to 0.18 sent as if every draft had been accepted."""
    from vllm_async_spec.spec_decode import DeviceProgress

    correct = DeviceProgress.correct

    def uncorrected(self: Any, *given: Any) -> None:
        self._drafts.fill(0)  # as if no row of the last step had had drafts
        correct(self, *given)

    DeviceProgress.correct = uncorrected  # type: ignore[method-assign,assignment]


def _stale_tokens(runner: Any) -> None:
    """A batch that goes on gets the tokens of the step before, in the runner of 0.19 to 0.29."""
    from vllm_async_spec import kernels
    from vllm_async_spec.vllm_plugin.patches.carried_inputs import Carried

    newest, advance = Carried.tokens_of, kernels.advance_batch
    before: Any = None

    def stale(found: Any) -> Any:
        nonlocal before
        last, before = before, found and tuple(each.clone() for each in found)
        return last if found and last and last[1].shape == found[1].shape else found

    def tokens_of(self: Carried, *given: Any) -> Any:
        return stale(newest(self, *given))

    def advance_batch(counts: Any, sampled: Any, drafts: Any, batch: int, inputs: Any) -> None:
        sampled, drafts = stale((sampled[:batch, 0], drafts[:batch]))
        advance(counts, sampled[:, None], drafts, batch, inputs)

    Carried.tokens_of = tokens_of  # type: ignore[method-assign,assignment]
    kernels.advance_batch = advance_batch


def _unmoved_rows(runner: Any) -> None:
    """A row that moved gets the tokens of the row that was in its place in the step before."""
    from vllm_async_spec.vllm_plugin.patches.steady_inputs import SteadyBatch

    take = SteadyBatch._take_rows

    def take_rows(self: SteadyBatch, runner: Any, rows: Any) -> None:
        take(self, runner, range(len(rows)))  # type: ignore[arg-type]

    SteadyBatch._take_rows = take_rows  # type: ignore[method-assign]


def _kept_states(runner: Any) -> None:
    """Where metadata of linear attention is kept, it says that one token was accepted."""
    from vllm_async_spec.vllm_plugin.patches.linear_attention import KeptStep

    newest = KeptStep.of_next

    def of_next(self: KeptStep, builder: Any, batch: Any, blocks: Any, accepted: Any) -> Any:
        return newest(self, builder, batch, blocks, accepted.new_ones(accepted.shape))

    KeptStep.of_next = of_next  # type: ignore[method-assign]


def _never_exact(runner: Any) -> None:
    """No batch waits for exact counts, whatever its requests need."""
    from vllm_async_spec.vllm_plugin.patches import optimistic_runner

    optimistic_runner.needed_by = lambda input_batch: None  # type: ignore[attr-defined]


CONTROLS: dict[str, Callable[[Any], None]] = {
    "lengths": _no_lengths,
    "fence": _no_fence,
    "short": _short,
    "short-last-rank": _short_on_last_rank,
    "states": _stale_states,
    "positions": _no_positions,
    "carried": _stale_tokens,
    "moved": _unmoved_rows,
    "kept": _kept_states,
    "exact": _never_exact,
}
"""Deliberate breakages of the process of a model runner, by name. A soak must notice each of them if its path uses the
broken part."""
