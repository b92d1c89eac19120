"""Captures a CUDA graph on all tensor-parallel ranks of an engine, or on none.

A graph holds the collectives of its ranks. If one rank replays it and another launches the same kernels one by one,
they read each other's buffers at the wrong addresses, or wait for each other for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed

from vllm_async_spec.patching import temporarily
from vllm_async_spec.streams import captured, refuse_waits

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import RunnerBase

Kept = TypeVar("Kept")
PATIENCE_S = 120.0
"""Seconds that ranks wait for each other; a step compiles kernels at most."""


class RankFailedError(RuntimeError):
    """A step failed on another rank, so this one undoes its own."""


class RanksApartError(RuntimeError):
    """Another rank does not come, so it may be waiting in a collective that this one has left."""


class Ranks:
    """Ranks that take each step together.

    Args:
        group: process group of all ranks on the host; None if there is one rank.
        patience_s: seconds that ranks wait for each other.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None, patience_s: float = PATIENCE_S) -> None:
        self._group, self._patience = group, timedelta(seconds=patience_s)

    @classmethod
    def of(cls, runner: RunnerBase) -> Ranks:
        """The tensor-parallel ranks of this runner's engine."""
        if runner.parallel_config.tensor_parallel_size == 1:
            return cls(None)
        from vllm.distributed.parallel_state import get_tp_group

        return cls(get_tp_group().cpu_group)

    def all_do(self, step: Callable[[], Kept]) -> Kept:
        """Run `step`, and return once each rank has run its own.

        Raises:
            RankFailedError: the step failed on another rank. Where it fails, its own error is raised.
            RanksApartError: a rank does not come within the set time.
        """
        if self._group is None:
            return step()
        made: list[Kept] = []
        error: Exception | None = None
        try:
            made.append(step())
        except Exception as raised:  # told to the other ranks first
            error = raised
        self._meet()
        said = None if error is None else f"{type(error).__name__}: {error}"
        found: list[str | None] = [None] * torch.distributed.get_world_size(self._group)
        with torch.inference_mode(mode=False):  # in inference mode gloo can't gather
            torch.distributed.all_gather_object(found, said, group=self._group)
        if error is not None:
            raise error
        for rank, each in enumerate(found):
            if each is not None:
                raise RankFailedError(f"rank {rank} failed: {each}")
        return made[0]

    def _meet(self) -> None:
        try:
            torch.distributed.monitored_barrier(self._group, timeout=self._patience)
        except RuntimeError as error:
            raise RanksApartError(
                f"vllm-async-spec: a rank did not capture drafting within {self._patience.total_seconds():g} s of this "
                f"one; the start ends here, because it could hang; look for that rank's error in the log ({error})"
            ) from error

    def capture(
        self, runs: Sequence[Callable[[], torch.Tensor]], pool: tuple[int, int], device: torch.device
    ) -> list[Callable[[], torch.Tensor]]:
        """A replay of each function, which must have run before; `pool` is that of `streams.captured`.

        Raises:
            RuntimeError: one of them can't be captured on one of the ranks.
        """

        def try_all() -> None:
            for run in runs:
                refuse_waits(run)

        self.all_do(try_all)
        with self._exchanging(device) as options:
            return self.all_do(lambda: [captured(run, pool, **options) for run in runs])

    @contextlib.contextmanager
    def _exchanging(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """At the end of the block vLLM's own all-reduce gives the other ranks the addresses of the graphs' buffers.

        Yields:
            Arguments of `torch.cuda.graph`.
        """
        if self._group is None:
            yield {}
            return
        from vllm.distributed.parallel_state import get_tp_group, graph_capture

        all_reduce = getattr(get_tp_group().device_communicator, "ca_comm", None)
        with temporarily() as changes, graph_capture(device=device) as context:
            try:
                yield {"stream": context.stream}
            except BaseException:
                if all_reduce is not None:  # the addresses are those of graphs that are gone
                    changes.set(all_reduce, "disabled", True)
                raise
