"""Stopping criteria that do not make the host wait: evaluated on the host, or on the device and read late."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from vllm_async_spec.generation.end_of_sequence import end_ids, ends_of
from vllm_async_spec.generation.flag_channel import FinishTracker, FlagChannel, OpenChannel, open_channel
from vllm_async_spec.generation.rollback import RngHistory
from vllm_async_spec.generation.stop_flags import StepFlags

_said: set[str] = set()


class SynchronousGenerationWarning(UserWarning):
    """Asynchronous stopping was requested, but generation is synchronous: the same tokens, but no faster."""


LATE = "stopping criteria are evaluated synchronously"
OWN_LOOP = "transformers' own loop generates"


def fall_back(reason: str, *, strict: bool, instead: str = LATE) -> None:
    """Warn that generation is synchronous because of `reason`, a clause; each reason once a process.

    `instead` says what happens now.

    Raises:
        ValueError: `strict` is set.
    """
    if strict:
        raise ValueError(f"{reason}; leave out strict to generate synchronously instead")
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"{instead}: {reason}", SynchronousGenerationWarning, stacklevel=2)


def check_pace(poll_every: int, max_in_flight: int) -> None:
    """Raise `ValueError` for a number of steps or of copies that is less than 1, or not int."""
    for name, value in (("poll_every", poll_every), ("max_in_flight", max_in_flight)):
        if type(value) is not int:
            raise ValueError(f"{name} is {value!r}; it must be int")
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


_KINDS = (MaxLengthCriteria, MaxTimeCriteria)
_ZERO = torch.zeros((1, 1), dtype=torch.long, device="cpu")


class HostCriteria:
    """The stopping criteria that the host can evaluate; `rest` keeps the others."""

    def __init__(self, criteria: Iterable[Any]) -> None:
        every = list(criteria)
        self._own = [each for each in every if type(each) in _KINDS]
        self.rest = [each for each in every if type(each) not in _KINDS]

    def stopped(self, length: int) -> bool:
        """Whether the length or the clock stops all rows now. A criterion sees ids of that length, all zero."""
        # No early exit: each criterion runs at each step, as in the synchronous loop.
        verdicts = [bool(each(_ZERO.expand(1, length), None)) for each in self._own if not _is_silent(each, length)]
        return any(verdicts)


def _is_silent(criterion: Any, length: int) -> bool:
    """Whether the criterion neither stops nor warns at this length. Skipping it saves a tensor at each step."""
    if type(criterion) is not MaxLengthCriteria or length >= criterion.max_length:
        return False
    return criterion.max_position_embeddings is None or length <= criterion.max_position_embeddings


def with_verdict(
    finished: torch.Tensor, criterion: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any
) -> torch.Tensor:
    """`finished`, bool (batch,), with the rows that `criterion` stops. The other arguments are passed to it.

    Raises:
        ValueError: its flags are neither one for each row nor one for all.
    """
    verdict = criterion(input_ids, scores, **kwargs)
    # A lone flag may also be a number, or lie on the host: PyTorch accepts both.
    if isinstance(verdict, torch.Tensor) and verdict.dim() > 0 and verdict.shape != finished.shape:
        if verdict.numel() not in (1, len(finished)):
            raise ValueError(
                f"the stopping criterion {type(criterion).__name__} returned flags of shape {tuple(verdict.shape)}; "
                f"it must return shape ({len(finished)},), one flag for each sequence"
            )
        verdict = verdict.flatten()
    stopped: torch.Tensor = finished | verdict
    return stopped


class DeviceCriteria:
    """Criteria that the host can't evaluate.

    One operation compares the newest token with the ids of all `EosTokenCriteria`. All others are called one at a
    time, as in transformers.
    """

    def __init__(self, criteria: Iterable[Any], device: torch.device) -> None:
        self._every = list(criteria)
        self._others = [each for each in self._every if type(each) is not EosTokenCriteria]
        self._ends = end_ids(self._every, device)
        self.beside = bool(self._others)
        """Whether to use a side stream. For one comparison alone, switching streams costs the host more."""

    def finished(
        self, before: torch.Tensor | None, input_ids: torch.Tensor, scores: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """The rows that have stopped at this step or before, bool (batch,), on the current stream.

        `before` has those of earlier steps; None if there was none. `input_ids`, int64 (batch, length), have this
        step's token. The other arguments are passed to the criteria.
        """
        finished, called = before, self._others
        if kwargs:
            called = self._every  # `kwargs` may say how many tokens are new
        elif self._ends is not None:
            ended = ends_of(input_ids.select(1, -1), self._ends)
            finished = ended if finished is None else finished | ended
        if finished is None:
            finished = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for criterion in called:
            finished = with_verdict(finished, criterion, input_ids, scores, **kwargs)
        return finished


class AsyncStoppingCriteriaList(StoppingCriteriaList):  # type: ignore[misc]  # transformers is not typed here
    """Any stopping criteria, evaluated without waiting for the verdict; serves one generation.

    Criteria run on a side stream. If only `EosTokenCriteria` need the device, their comparison with the newest token
    runs on the generating stream.

    The host keeps launching steps until the flags of an earlier step arrive. Steps launched after the last row has
    stopped are extra steps; `finish` returns their number, and the caller crops them. The host evaluates `max_length`
    and `max_time`, so they cause no extra steps, and a static cache is never written past its end.

    On a device other than CUDA the list evaluates its criteria synchronously, and warns once.

    Args:
        criteria: what to evaluate, transformers' own or custom criteria. Extra steps also call a criterion
            that keeps state on the host.
        poll_every: steps whose flags share one copy to the host, at least 1.
        max_in_flight: copies of flags in flight, at least 1; for one more, the host waits. So at most
            `poll_every * (max_in_flight + 1) - 1` extra steps run.
        rewind_generator: whether `finish` undoes what extra steps drew from the device's default generator.
        pads: whether the list shows criteria with an `eos_token_id`, for which transformers' loop pads stopped rows. A
            single row needs no pads, because its tokens after the end are cropped; without pads a step launches less.
        starts_unfinished: whether the loop's first `unfinished & ~verdict` has no row that the loop itself has ended,
            as in transformers' loop. The host then knows the maximum of that, too; else reading it waits.
        open_channel: how flags reach the host; the default uses a CUDA stream and pinned memory.
        strict: whether the first step raises `ValueError` where the list would be synchronous.

    Raises:
        ValueError: `poll_every` or `max_in_flight` is less than 1, or not int.
    """

    def __init__(
        self,
        criteria: Iterable[Any] = (),
        *,
        poll_every: int = 1,
        max_in_flight: int = 1,
        rewind_generator: bool = True,
        pads: bool = True,
        starts_unfinished: bool = False,
        open_channel: OpenChannel = open_channel,
        strict: bool = False,
    ) -> None:
        check_pace(poll_every, max_in_flight)
        self._every = StoppingCriteriaList(criteria)
        super().__init__(each for each in self._every if pads or not hasattr(each, "eos_token_id"))
        self.poll_every = poll_every
        self.max_in_flight = max_in_flight
        self._rewind = rewind_generator
        self._starts_unfinished = starts_unfinished
        self._open_channel = open_channel
        self._strict = strict
        self._run: _Run | None = None
        self._synchronous = False
        self._length = 0
        self._sequences: torch.Tensor | None = None
        self._spent = False
        self._stopped_by_host: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether the host knows that every row has stopped; never waits. False if the list is synchronous."""
        return self._stopped_by_host is not None or (self._run is not None and self._run.watch.finished_at is not None)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Evaluate the criteria for one step.

        Args:
            input_ids: int64 (batch, length), with the token of this step.
            scores: the scores collected so far, passed to the criteria.
            kwargs: passed to the criteria.

        Returns:
            bool (batch,), rows that have stopped at this step or before. The host answers the maximum of its inverse;
            any other use waits on the device, not on the host.

        Raises:
            ValueError: a criterion's flags have a wrong shape; or `strict` is set, and the list would be synchronous.
            RuntimeError: the list has served a generation before.
        """
        self._advance(input_ids.shape[1])
        self._sequences = input_ids
        if self._run is None and not self._synchronous:
            self._start(input_ids.device)
        if self._run is None:
            verdict: torch.Tensor = self._every(input_ids, scores, **kwargs)
            return verdict
        return self._run_step(self._run, input_ids, scores, kwargs)

    def finish(self) -> int:
        """Wait for the flags in flight, and rewind the generator to the last step that counts.

        Returns:
            Number of extra steps, which the caller undoes.
        """
        self._spent = True
        run = self._run
        if run is None:
            return 0
        length = _ended_at(run) or self._length
        extra = self._length - length
        if extra and run.trail is not None:
            run.trail.rewind(length)
        return extra

    def recover(self) -> torch.Tensor | None:
        """After the loop has raised: the sequences, int64 (batch, length), if all rows had stopped before.

        Then it was an extra step that raised. The generator is rewound as by `finish`. None if a row had not stopped.
        """
        run = self._run
        if run is None or self._sequences is None:
            return None
        length = _ended_at(run)
        if length is None:
            return None
        if run.trail is not None:
            run.trail.rewind(length)
        return self._sequences[:, :length].clone(memory_format=torch.contiguous_format)

    def _advance(self, length: int) -> None:
        """Note the length of this step, or refuse the step of a second generation."""
        if self._spent or length < self._length:
            why = (
                "finish() has ended it"
                if self._spent
                else f"its sequences shrank from {self._length} to {length} tokens"
            )
            raise RuntimeError(
                f"an AsyncStoppingCriteriaList serves one generation, and {why}; make a new list for each generation"
            )
        self._length = length

    def _start(self, device: torch.device) -> None:
        channel = self._open_channel(device, self.poll_every, self.max_in_flight)
        if channel is None:
            fall_back(
                f"asynchronous stop flags need a CUDA device, and input_ids are on {device.type}", strict=self._strict
            )
            self._synchronous = True
            return
        furthest = self.poll_every * (self.max_in_flight + 1)
        self._run = _Run(
            channel,
            FinishTracker(channel, device, width=self.poll_every, in_flight=self.max_in_flight),
            RngHistory(device, furthest) if self._rewind else None,
            host := HostCriteria(self._every),
            DeviceCriteria(host.rest, device),
        )

    def _run_step(self, run: _Run, input_ids: torch.Tensor, scores: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        length, is_first, beside = self._length, run.finished is None, run.device_criteria.beside
        was_stopped = self.stopped
        if run.host_criteria.stopped(length):
            self._stopped_by_host = length
        with run.channel.beside() if beside else contextlib.nullcontext():
            finished = run.device_criteria.finished(run.finished, input_ids, scores, kwargs)
            if self._stopped_by_host is not None:
                finished = torch.ones_like(finished)  # not in place: these may be earlier flags
            run.finished = finished
            sent = run.watch.record(finished, length, *((input_ids, scores) if beside else ()))
        if run.trail is not None and not was_stopped:  # a loop that goes on would push out the state to rewind to
            run.trail.mark(length)
        if sent and self._stopped_by_host is None:
            run.watch.poll()
        return StepFlags(
            finished,
            run.channel,
            beside=beside,
            length=length,
            all_before=is_first and self._starts_unfinished,
            stopped=self.stopped,
        ).verdict()


class _Run:
    """The state of one generation."""

    __slots__ = ("channel", "device_criteria", "finished", "host_criteria", "trail", "watch")

    def __init__(
        self,
        channel: FlagChannel,
        watch: FinishTracker,
        trail: RngHistory | None,
        host_criteria: HostCriteria,
        device_criteria: DeviceCriteria,
    ) -> None:
        self.channel = channel
        self.watch = watch
        self.trail = trail
        self.host_criteria = host_criteria
        self.device_criteria = device_criteria
        self.finished: torch.Tensor | None = None


def _ended_at(run: _Run) -> int | None:
    """Wait for the flags in flight: the length at which the last row had stopped, or None if a row had not."""
    length = run.watch.drain()
    # Tensors of extra steps may be freed from here on, so their readers on the side stream come first.
    run.channel.join()
    return length
