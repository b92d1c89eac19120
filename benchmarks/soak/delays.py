"""Random work on the device of one rank, so that the device falls behind the host."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from vllm_async_spec.patching import Transaction

_LONGEST_DELAY_MS = 6.0
_DELAYED = 0.25
"""Share of the possible places that get a delay."""


class Device(Protocol):
    """What delays need of a device."""

    def capturing(self) -> bool:
        """Whether the current stream records a graph, which must hold no delay."""

    def work(self, ms: float) -> None:
        """Keep the current stream busy for so many milliseconds."""


class CudaDevice:
    """The current CUDA device."""

    def __init__(self) -> None:
        """Measure its clock.

        Raises:
            RuntimeError: there is no device to delay.
        """
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device to delay")
        self._cuda: Any = torch.cuda
        self._cycles_per_ms = _cycles_per_ms(torch)

    def capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return bool(self._cuda.is_current_stream_capturing())

    def work(self, ms: float) -> None:
        """Keep the current stream busy."""
        self._cuda._sleep(int(self._cycles_per_ms * ms))


class Delays:
    """Random work before and after each metadata build of a model runner, and before each of its steps."""

    def __init__(self, runner: Any, seed: int, device: Device | None = None) -> None:
        """Prepare delays; `device` None is the current CUDA device.

        Raises:
            RuntimeError: there is no device to delay.
        """
        self._device = device or CudaDevice()
        self._runner, self._source = runner, random.Random(seed)
        self._counted: Counter[str] = Counter()
        self._changes = Transaction()

    def begin(self) -> None:
        """Delay from here on."""
        with self._changes:
            for builder in builders(self._runner):
                self._changes.set(builder, "build", self._around(builder, "build", after=True))
            for name in ("execute_model", "sample_tokens"):
                self._changes.set(type(self._runner), name, self._around(type(self._runner), name, after=False))

    def end(self) -> dict[str, int]:
        """Delay no longer, and return the number of delays by place."""
        self._changes.roll_back()
        return dict(self._counted)

    def _maybe(self, place: str) -> None:
        if not self._device.capturing() and self._source.random() < _DELAYED:
            self._counted[place] += 1
            self._device.work(_LONGEST_DELAY_MS * self._source.random() ** 4)

    def _around(self, owner: type[Any], name: str, *, after: bool) -> Callable[..., Any]:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._maybe(f"before {name}")
            answer = original(*args, **kwargs)
            if after:
                self._maybe(f"after {name}")
            return answer

        return wrapped


def builders(runner: Any) -> list[type[Any]]:
    """The classes of the target's metadata builders, each once."""
    groups = (group for groups in runner.attn_groups for group in groups)
    return list(dict.fromkeys(type(group.get_metadata_builder(0)) for group in groups))


def _cycles_per_ms(torch: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return 10_000_000 / float(start.elapsed_time(end))
