"""Records the middle of a loop's run in this process: with the audit's recorder and host waits, or with CUPTI alone."""

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_async_spec.audit.device_time import Shares, shares_between
from vllm_async_spec.audit.device_trace import DeviceTrace, read_trace
from vllm_async_spec.audit.recorded import SETTLING, Recorded, load
from vllm_async_spec.audit.recording import How, Order, Recorder, device_profile
from vllm_async_spec.audit.report import Place
from vllm_async_spec.patching import temporarily

_FEWEST = 4 * (SETTLING + 2)

OnStep = Callable[[], object]
Run = Callable[[OnStep], object]
"""Runs a loop to its end, and calls its argument, on the thread that launches, as each step begins."""


class MiddleError(RuntimeError):
    """There is no middle to record, or recording it failed."""


@dataclass(frozen=True, slots=True)
class Middle:
    recorded: Recorded

    def waits_a_step(self, place: Place) -> float:
        """Waits a step of this place; all but hidden waits are the launching thread's."""
        return sum(wait.place is place for wait in self.recorded.waits) / self.recorded.count

    def busy(self) -> float:
        """Share of the time in which the device was busy."""
        recorded = self.recorded
        assert recorded.trace is not None
        return shares_between(recorded.trace, recorded.start, recorded.end).busy


def record_middle(run: Run, *, at_most: int | None = None) -> Middle:
    """Run the loop once to count its steps and to warm up, and once more to record the middle steps.

    At most half of all steps are recorded, and no more than `at_most`. The loop takes equally many steps each time.

    Raises:
        MiddleError: the loop has too few steps, or recording failed.
    """
    steps = _steps_of(run)
    if steps < _FEWEST:
        raise MiddleError(
            f"a run of {steps} steps has no middle to record; give more new tokens, for at least {_FEWEST} steps"
        )
    wanted = min(steps // 2, steps if at_most is None else at_most + SETTLING)
    recorder = Recorder(watch_all=lambda *_: None)
    with tempfile.TemporaryDirectory() as folder:
        recorder.arm(Order(How.FULL, skip=(steps - wanted) // 2, steps=wanted, folder=folder))
        try:
            run(recorder.on_step)
        except BaseException:
            recorder.cancel()
            raise
        try:
            files = recorder.save("middle")
        except RuntimeError as error:
            raise MiddleError(f"recording a run of {steps} steps failed: {error}") from error
        return Middle(load(files))


@contextlib.contextmanager
def before_each(owner: Any, name: str, on_step: OnStep) -> Iterator[None]:
    """Call `on_step` before each call of `owner.name`, a method of a class or of one object."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        on_step()
        return function(*args, **kwargs)

    with temporarily() as changes:
        changes.set(owner, name, stepping)
        yield


def shares_of_run(run: Callable[[], object]) -> Shares:
    """Shares of the device's time in the middle half of a run."""
    with _profiler() as profiler:
        run()
    trace = _traced(profiler)
    start, end = int(trace.start[0]), int(trace.end.max())
    return shares_between(trace, start + (end - start) // 4, end - (end - start) // 4)


def shares_of_steps(run: Run) -> Shares:
    """Shares of the device's time in the third quarter of a run's steps, when long prompts have been prefilled."""
    steps = _steps_of(run)
    profiler, step = _profiler(), 0

    def on_step() -> None:
        nonlocal step
        if step == steps // 2:
            profiler.start()
        if step == steps * 3 // 4:
            profiler.stop()
        step += 1

    run(on_step)
    trace = _traced(profiler)
    # The trace lacks earlier launches and ends within a step, so cut off an eighth at each end.
    start, end = int(trace.start[0]), int(trace.end.max())
    return shares_between(trace, start + (end - start) // 8, end - (end - start) // 8)


def _steps_of(run: Run) -> int:
    steps = itertools.count()
    run(lambda: next(steps))
    return next(steps)


def _profiler() -> torch.profiler.profile:
    torch.cuda.synchronize()
    return device_profile()


def _traced(profiler: torch.profiler.profile) -> DeviceTrace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
