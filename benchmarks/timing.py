"""Milliseconds a step, tokens a second and acceptance length, from an engine's outputs and their times."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.loads import Load, Request

_CALLS = 200


class TimingError(RuntimeError):
    """A run can't be timed; the message says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine: when its output arrived, and the new tokens of each request."""

    at: float
    tokens: dict[str, int]
    finished: frozenset[str]


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    tokens: int
    steps: int
    """Timed steps: for a steady load, those in which every request decodes."""
    step_ms: float
    tokens_per_second: float
    acceptance_length: float
    """Mean tokens a step and request, the target's own included."""


def time_run(load: Load, start: float, steps: Sequence[Step]) -> Timing:
    """The timing of one run of `load`, of all its steps with output, in their order.

    `start` is when the run began, in seconds of `time.perf_counter`.

    Raises:
        TimingError: the load is steady, and in no step does every request decode.
    """
    all_running = first_finished = None
    seen: set[str] = set()
    for index, step in enumerate(steps):
        seen |= step.tokens.keys()
        if all_running is None and len(seen) == load.requests:
            all_running = index
        if first_finished is None and step.finished:
            first_finished = index
    if not load.steady:
        timed, begin = steps, start
    else:
        assert all_running is not None
        assert first_finished is not None
        timed, begin = steps[all_running + 1 : first_finished], steps[all_running].at
    if not timed:
        raise TimingError(
            f"{load.name} has no step in which all its {load.requests} requests decode; ask for more tokens"
        )
    seconds = timed[-1].at - begin
    tokens = sum(sum(step.tokens.values()) for step in timed)
    return Timing(
        seconds=seconds,
        tokens=tokens,
        steps=len(timed),
        step_ms=seconds / len(timed) * 1000,
        tokens_per_second=tokens / seconds,
        acceptance_length=_acceptance_length(steps),
    )


def _acceptance_length(steps: Sequence[Step]) -> float:
    """Mean tokens a step and request, without the step of the prompt.

    Near a request's end only steps count that the end could not cut off: steps that began with at least as many tokens
    left as the longest step has. To leave out just the steps that were cut off would remove long ones more often.
    """
    streams: dict[str, list[int]] = {}
    for step in steps:
        for request, tokens in step.tokens.items():
            streams.setdefault(request, []).append(tokens)
    longest = max((tokens for stream in streams.values() for tokens in stream[1:]), default=1)
    counted = emitted = 0
    for _, *stream in streams.values():
        left = sum(stream)
        for tokens in stream:
            if left < longest:
                break
            counted, emitted, left = counted + 1, emitted + tokens, left - tokens
    return emitted / counted if counted else 1.0


class Driver:
    """Gives loads to a vLLM engine, and records each step's output as the engine core returns it."""

    def __init__(self, llm: Any, sampling: Any) -> None:
        """Drive `llm`, a `vllm.LLM`; `sampling(max_tokens)` makes a request's parameters."""
        self._llm, self._sampling = llm, sampling
        self._served = 0

    def run(self, requests: Sequence[Request], running: int) -> None:
        """Serve the requests, at most `running` at once."""
        engine, waiting = self._llm.llm_engine, deque(requests)
        in_flight = 0
        while waiting or in_flight:
            while waiting and in_flight < running:
                self.add(f"bench-{self._served}", waiting.popleft())
                self._served += 1
                in_flight += 1
            in_flight -= sum(output.finished for output in engine.step())

    def add(self, name: str, request: Request) -> None:
        prompt = {"prompt_token_ids": list(request.prompt)}
        self._llm.llm_engine.add_request(name, prompt, self._sampling(request.max_tokens))

    def time(self, load: Load, requests: Sequence[Request]) -> Timing:
        with self._recording() as outputs:
            start = time.perf_counter()
            self.run(requests, load.running)
        steps = [_step(at, output) for at, output in outputs if output.outputs]
        return time_run(load, start, steps)

    @contextmanager
    def _recording(self) -> Iterator[list[tuple[float, Any]]]:
        """Record every output of the engine core, and read none before the end."""
        client = self._llm.llm_engine.engine_core
        original, outputs = client.get_output, []

        def get_output() -> Any:
            output = original()
            outputs.append((time.perf_counter(), output))
            return output

        client.get_output = get_output
        try:
            yield outputs
        finally:
            del client.get_output


def _step(at: float, output: Any) -> Step:
    return Step(
        at,
        {each.request_id: len(each.new_token_ids) for each in output.outputs if each.new_token_ids},
        frozenset(each.request_id for each in output.outputs if each.finished),
    )


def microseconds_on_an_idle_device(call: Callable[[], Any]) -> float:
    """Mean host time of a call, in microseconds; the device finishes each call before the next, outside the timing."""
    total = 0.0
    for _ in range(_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        total += time.perf_counter() - start
    return total / _CALLS * 1e6
