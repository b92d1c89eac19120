"""The launched steps whose tokens the scheduler does not have yet."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.batching.request import RequestError
from vllm_async_spec.generation.batching.runner import Launched, OpenStep, Runner
from vllm_async_spec.generation.batching.scheduler import Row, Scheduler, Step
from vllm_async_spec.generation.batching.step_slots import COUNT, STOPS, TOKEN
from vllm_async_spec.generation.batching.streams import Streams
from vllm_async_spec.streams import counted_wait


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: Step
    launched: Launched


class StepsInFlight:
    """Launches the steps that a scheduler plans, and passes their results to the scheduler, oldest first."""

    def __init__(self, scheduler: Scheduler, runner: Runner, streams: Streams, device: torch.device) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._streams = streams
        self._device = device
        self._steps: deque[_InFlight] = deque()
        self._spare: OpenStep | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, step: Step) -> None:
        """Launch a step. If rows find no memory on the device, the last of their requests ends."""
        with _on(self._device):
            opened = self._spare or self._runner.open()
            opened.fill(step.decodes, step.prefills)
            decodes = self._tried(opened.decode, step.decodes)
            prefills = self._tried(opened.prefill, step.prefills)
            if decodes or prefills:
                self._spare = None
                self._steps.append(_InFlight(Step(decodes, prefills), opened.close()))
            else:
                # Reuse this slot next: the slot after it may belong to a step in flight.
                self._spare = opened

    def collect(self) -> None:
        """Read the tokens of the oldest step, after a wait if needed, and pass them to the scheduler."""
        step, launched = self._steps[0].step, self._steps[0].launched
        counted_wait(launched.arrival, "tokens of a step", launched.results.nbytes)
        self._steps.popleft()
        rows: list[list[int]] = launched.results.tolist()
        batch = self._runner.batch
        found = [*rows[: len(step.decodes)], *rows[batch : batch + len(step.prefills)]]
        self._scheduler.apply_results(step.rows, [(row[TOKEN : TOKEN + row[COUNT]], bool(row[STOPS])) for row in found])

    def forget(self) -> None:
        """Drop all steps in flight without reading their results."""
        self._steps.clear()

    def release(self) -> None:
        """Let go of the runner, and with it of the cache; no step may be launched any more."""
        self._spare = None
        del self._runner

    def _tried(self, launch: Callable[[Sequence[Row]], None], rows: list[Row]) -> list[Row]:
        """The rows that were launched: all, or none if memory ran out; then the last row's request fails."""
        if not rows:
            return rows
        try:
            launch(rows)
        except torch.OutOfMemoryError as error:
            # Kernels launched before the failure may still read the step's buffers.
            self._streams.drain()
            last = rows[-1].job
            self._scheduler.undo(rows)
            message = f"the device's memory is too small for this request and {len(rows) - 1} others: {error}"
            self._scheduler.fail(last, RequestError(message))
            return []
        return rows


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device current in this thread, which may not be the thread that made the batcher."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
