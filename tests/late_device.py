"""A device whose flags arrive late, without a GPU: what a channel sends is readable only some sends later."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
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
    _random: random.Random = field(init=False)

    def __post_init__(self):
        self._random = random.Random(self.seed)

    def open(self, device: torch.device, width: int, in_flight: int) -> LateChannel:
        assert device.type == "cpu"
        return self

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
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
