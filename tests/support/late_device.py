"""A device whose flags arrive late, without a GPU: what a channel sends is readable only some sends later."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class LateChannel:
    """A `FlagChannel` on the CPU. Each copy arrives `lateness` copies late, or at most so, if seeded."""

    lateness: int
    seed: int | None = None
    sent: int = 0
    waits: int = 0
    joins: int = 0
    besides: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self):
        self._random = random.Random(self.seed)

    def open(self, device: torch.device, width: int, in_flight: int) -> LateChannel:
        assert device.type == "cpu"
        return self

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self.besides += 1
        yield

    def join(self) -> None:
        self.joins += 1

    def send(self, flags: torch.Tensor) -> LateArrival:
        self.sent += 1
        late = self.lateness if self.seed is None else self._random.randint(0, self.lateness)
        return LateArrival(self, flags.clone(), self.sent + late)


@dataclass
class LateArrival:
    channel: LateChannel
    flags: torch.Tensor
    due: int

    def arrived(self) -> bool:
        return self.channel.sent >= self.due

    def wait(self) -> list[bool]:
        self.channel.waits += not self.arrived()
        return self.flags.tolist()


@dataclass
class LateStreams:
    """`Streams` on the CPU whose work runs in order when somebody waits for it; if seeded, some before."""

    seed: int | None = None
    waits: int = 0
    _queue: list[tuple[Callable[[], None], bool]] = field(default_factory=list)
    """What is left to run, and whether it was launched in inference mode."""
    _random: random.Random = field(init=False)

    def __post_init__(self):
        self._random = random.Random(self.seed)

    def open(self, device: torch.device, slots: int) -> LateStreams:
        assert device.type == "cpu"
        return self

    def copy_in(self, slot: int, copy: Callable[[], None]) -> None:
        self._launch(copy)

    def compute(self, slot: int, work: Callable[[], None]) -> None:
        self._launch(work)

    def copy_out(self, slot: int, copy: Callable[[], None]) -> StreamArrival:
        self._launch(copy)
        return StreamArrival(self, copy)

    def drain(self) -> None:
        while self._queue:
            self._run_first()

    def _launch(self, work: Callable[[], None]) -> None:
        self._queue.append((work, torch.is_inference_mode_enabled()))
        if self.seed is not None:
            for _ in range(self._random.randint(0, 2)):
                self._run_first()

    def _run_first(self) -> None:
        if self._queue:
            work, mode = self._queue.pop(0)
            with torch.inference_mode(mode):
                work()


@dataclass
class StreamArrival:
    streams: LateStreams
    copy: Callable[[], None]

    def query(self) -> bool:
        return all(work is not self.copy for work, _ in self.streams._queue)

    def synchronize(self) -> None:
        self.streams.waits += 1
        while not self.query():
            self.streams._run_first()
