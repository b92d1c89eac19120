"""Record some consecutive steps of an engine in one process, as plain data for later analysis.

An armed `Recorder` is called at every step; it skips some steps, records some, and stops by itself. Its hooks are in
the process only while it records. Its clock is nanoseconds since the epoch, as CUPTI's.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vllm_async_spec.audit.cpu_waits import CpuWaits
from vllm_async_spec.audit.cuda_waits import CudaWaits
from vllm_async_spec.audit.spans import Watch
from vllm_async_spec.audit.stack import plain

DONE = "done"
"""A file of this name appears in the order's folder with the last step, so that waiting does not disturb the engine."""


class How(str, enum.Enum):
    """What is recorded."""

    PLAIN = "plain"
    """When steps start, and nothing else: what the load costs without an audit."""
    DEVICE = "device"
    """Steps and CUPTI's records: what the GPU did, with little disturbance. Only with a GPU."""
    FULL = "full"
    """Steps, phases, waits and, with a GPU, CUPTI's records."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a recorder."""

    how: How
    skip: int
    """Steps to leave out first, until the batch has settled."""
    steps: int
    folder: str
    """Directory for the recording, which the sender of the order can read."""


class UnderWay(RuntimeError):
    """Another recording has not ended."""


def device_profile() -> profile:
    """A profile of CUPTI's records, to be exported as a trace."""
    # The warning says that the next profile forgets this one's events. With `acc_events` to keep them, `stop` makes
    # dozens of Python objects of each event: seconds in a step of the engine, and more when they are collected.
    warnings.filterwarnings("ignore", r".*Profiler clears events at the end of each cycle")
    return profile(activities=[ProfilerActivity.CUDA])


@dataclass(slots=True)
class Recorder:
    """Records steps of the thread that calls `on_step`; `watch_all` starts to watch functions by phase."""

    watch_all: Callable[[Watch, CpuWaits | None], None]
    order: Order | None = None
    done: bool = False
    failure: str | None = None
    """Why the recording failed; None if it did not."""
    steps: list[int] = field(default_factory=list)
    """When each recorded step started, and when the one after the last did."""
    _seen: int = 0
    _thread: int = 0
    _watch: Watch = field(default_factory=Watch)
    _cpu: CpuWaits | None = None
    _cuda: CudaWaits | None = None
    _profile: profile | None = None

    @property
    def recorded(self) -> int:
        """Steps that are complete."""
        return max(len(self.steps) - 1, 0)

    def arm(self, order: Order) -> None:
        """Record the next steps as `order` says.

        Raises:
            UnderWay: a recording has not ended.
        """
        if self.order is not None:
            raise UnderWay(
                f"an audit of this engine is under way ({self.recorded} of {self.order.steps} steps); "
                "wait until it ends, or send the engine more requests"
            )
        self._forget()
        self.order = order

    def cancel(self) -> None:
        """Stop at once, and discard the recording."""
        self._stop()
        self._forget()

    def on_step(self) -> None:
        """Note that a step starts, on the thread that launches the forward."""
        order = self.order
        if order is None or self.done:
            return
        self._seen += 1
        if self._seen <= order.skip:
            return
        try:
            self._note_step(order)
        except Exception as error:  # a failed audit must not stop the engine
            self.failure = f"recording failed: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                self._end(order)
            self.done = True

    def _note_step(self, order: Order) -> None:
        if not self.steps:
            self._thread = threading.get_ident()
            if order.how is not How.PLAIN:
                self._start(order.how)
        self.steps.append(time.time_ns())
        if len(self.steps) > order.steps:
            self._end(order)

    def _end(self, order: Order) -> None:
        self._stop()
        self.done = True
        Path(order.folder, DONE).touch()

    def start_phases(self) -> None:
        """Watch functions from now on, in a process that has phases but no steps."""
        self._thread = threading.get_ident()
        self._watch_phases()

    def _start(self, how: How) -> None:
        if torch.cuda.is_available():
            self._profile = device_profile()
            self._profile.start()
            if how is How.DEVICE:
                return
            self._cuda = CudaWaits()
            self._cuda.start()
        else:
            self._cpu = CpuWaits()
        self._watch_phases()

    def _watch_phases(self) -> None:
        self._watch.watch_collections()
        self.watch_all(self._watch, self._cpu)

    def _stop(self) -> None:
        self._watch.stop()
        if self._cpu is not None:
            self._cpu.stop()
        if self._cuda is not None:
            self._cuda.stop()
        if self._profile is not None and not self.done:
            torch.cuda.synchronize()  # kernels that are still running belong to the recording
            self._profile.stop()

    def _forget(self) -> None:
        self.order, self.done, self.failure, self.steps, self._seen = None, False, None, [], 0
        self._watch, self._cpu, self._cuda, self._profile = Watch(), None, None, None

    def save(self, name: str) -> dict[str, str]:
        """Write the recording into the order's folder, and be ready for the next order.

        Returns:
            The files: `recording`, and with a GPU CUPTI's `trace`.

        Raises:
            RuntimeError: recording failed; the message says why.
        """
        assert self.order is not None
        self._stop()
        if failure := self.failure:
            self._forget()
            raise RuntimeError(failure)
        folder = Path(self.order.folder)
        files = {"recording": str(folder / f"{name}.json")}
        if self._profile is not None:
            files["trace"] = str(folder / f"{name}.trace.json")
            self._profile.export_chrome_trace(files["trace"])
        Path(files["recording"]).write_text(json.dumps(self._as_data()), encoding="utf-8")
        self._forget()
        return files

    def _as_data(self) -> dict[str, Any]:
        calls = [] if self._cuda is None else self._cuda.calls
        return {
            "steps": self.steps,
            "thread": self._thread,
            "threads": {str(thread.ident): thread.name for thread in threading.enumerate()},
            "spans": [asdict(span) for span in self._watch.spans],
            "calls": [
                {"thread": c.thread, "what": c.what, "start": c.start, "end": c.end, "stack": plain(c.stack)}
                for c in calls
            ],
            "reads": [] if self._cpu is None else self._cpu.reads_as_data(),
            "simulated": self._cpu is not None,
        }
