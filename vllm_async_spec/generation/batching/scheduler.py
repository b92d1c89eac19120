"""What each step computes, planned before it is known what the steps in flight gave. Plain Python, no tensors.

How far a request has got is known when a step is planned, not when it has run: each row of a step that samples adds one
token. What is learned late is only whether that token ended the sequence. A row planned in between computes a token too
many, which is dropped.

With drafts a row adds one token at least, and one more for each draft at most. How many is learned late too. Until then
a request is taken to be as long as if all were accepted, and to have as many tokens as if none were.

A request has its slot and all pages that it can ever need, from the step that admits it to the last one that writes to
them. So nothing that runs is ever pushed out, and no page changes hands while a step in flight may write to it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_async_spec.generation.batching.pages import PageAllocator
from vllm_async_spec.generation.batching.request import Request, RequestError


def _no_pages() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Job:
    """A request in the scheduler's books. Its counts include the steps in flight."""

    request: Request
    request_slot: int = -1
    """Where the device keeps its last token; -1 before it is admitted."""
    pages: array[int] = field(default_factory=_no_pages)
    """Of the cache; of a kind that numpy copies without looking at each."""
    computed: int = 0
    """Tokens whose keys and values the steps planned so far write; with drafts in flight, at most."""
    sampled: int = 0
    """Tokens that the steps planned so far sample; with drafts in flight, at least."""
    given: int = 0
    """Tokens that the request has been given; the list that it keeps of them belongs to the caller."""
    in_flight: int = 0
    """Steps that have a row of it and of which nothing is known yet."""

    @property
    def in_prompt(self) -> bool:
        """Whether a part of the prompt is in no step yet."""
        return self.computed < len(self.request.prompt)

    @property
    def may_decode(self) -> bool:
        """Whether a step may add a token to it, as far as is known."""
        return not self.in_prompt and self.sampled < self.request.max_new_tokens

    @property
    def last(self) -> int:
        """The last position whose token may be fed to the model: the one before the last of the sequence."""
        return len(self.request.prompt) + self.request.max_new_tokens - 2


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start` to `stop` (excluded) of a sequence, all in one step."""

    job: Job
    start: int
    stop: int
    samples: bool
    """Whether it gives a token: not before the prompt's last."""
    drafts: int = 0
    """How many of its tokens are drafts, each of which may give one more."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: rows of tokens that the device has, and rows of prompts."""

    decodes: list[Row]
    prefills: list[Row]

    @property
    def rows(self) -> list[Row]:
        """All of them, decodes first."""
        return self.decodes + self.prefills


class Scheduler:
    """First come, first served; decodes in each step, beside prefills in chunks.

    Args:
        pages: of the KV cache.
        page_size: tokens in a page.
        max_batch: requests that run at once.
        max_length: tokens of a sequence, prompt and generated.
        max_prefill_tokens: prompt tokens in a step.
        max_prefills: prompts in a step.
        drafts: drafts of each row that is decoded.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        page_size: int,
        max_batch: int,
        max_length: int,
        max_prefill_tokens: int,
        max_prefills: int,
        drafts: int = 0,
    ) -> None:
        self.pages = pages
        self.verified = self.given = 0
        """Rows with drafts of which is known what they gave, and the tokens that they gave."""
        self._drafts = drafts
        self._page_size = page_size
        self._max_length = max_length
        self._max_prefill_tokens = max_prefill_tokens
        self._max_prefills = max_prefills
        self._request_slots = list(range(max_batch - 1, -1, -1))
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    @property
    def busy(self) -> bool:
        """Whether a request is not finished, or a step in flight has a row of one."""
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: the prompt is empty, no token is asked for, or the sequence is longer than fits.
        """
        tokens = len(request.prompt)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        needed = tokens + request.max_new_tokens
        if needed > self._max_length:
            raise RequestError(
                f"the prompt has {tokens} tokens and max_new_tokens is {request.max_new_tokens}, together more than "
                f"max_length, {self._max_length}; shorten one of them, or make the batcher with a larger one"
            )
        if self._pages_of(request) > self.pages.capacity:
            raise RequestError(
                f"the request may need {self._pages_of(request)} pages of {self._page_size} tokens, and the cache has "
                f"{self.pages.capacity}; make the batcher with larger cache_tokens"
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` has let pass."""
        self._waiting.append(Job(request))

    def cancel(self, request: Request) -> None:
        """Plan no more of a request, unless it is finished; what steps in flight give for it is dropped."""
        if request.finished:
            return
        for job in [*self._waiting, *self._running]:
            if job.request is request:
                self._end(job, "cancelled")
                return

    def plan(self) -> Step | None:
        """The next step, counted as in flight from now on; None where there is nothing to compute before more is known.

        Every step must be handed to `apply_results`, in order, or its rows to `undo`.
        """
        decodes: list[Row] = []
        prefills: list[Row] = []
        budget = self._max_prefill_tokens
        for job in self._running:
            if job.request.finished:
                continue
            if job.may_decode:
                decodes.append(self._take(job, 1 + self._drafts))
            elif job.in_prompt and budget and len(prefills) < self._max_prefills:
                prefills.append(self._take(job, budget))
                budget -= prefills[-1].stop - prefills[-1].start
        while budget and len(prefills) < self._max_prefills and (admitted := self._admit()) is not None:
            prefills.append(self._take(admitted, budget))
            budget -= prefills[-1].stop - prefills[-1].start
        return Step(decodes, prefills) if decodes or prefills else None

    def apply_results(self, rows: Sequence[Row], results: Iterable[tuple[Sequence[int], bool]]) -> None:
        """Take in what a step gave.

        Args:
            rows: its rows.
            results: for each, its tokens, and whether the last is an end of sequence; of rows that don't sample,
                anything.
        """
        for row, (tokens, stops) in zip(rows, results, strict=True):
            row.job.in_flight -= 1
            if row.samples and not row.job.request.finished:
                self._give(row, tokens, stops)
            self._release_if_left(row.job)

    def undo(self, rows: Iterable[Row]) -> None:
        """Take back rows of the step planned last, which was not run: the next has them again."""
        for row in rows:
            row.job.computed = row.start
            row.job.sampled -= row.samples
            row.job.in_flight -= 1
            self._release_if_left(row.job)

    def fail(self, job: Job, error: RequestError) -> None:
        """End a request with an error."""
        if not job.request.finished:
            self._end(job, "error", error)

    def fail_all(self, error: RequestError) -> None:
        """End all requests with an error, when no step is in flight any more or ever will be."""
        for job in [*self._waiting, *self._running]:
            job.in_flight = 0
            self.fail(job, error)
            self._release_if_left(job)

    def _give(self, row: Row, tokens: Sequence[int], stops: bool) -> None:
        job, request = row.job, row.job.request
        room = request.max_new_tokens - job.given
        given = tokens[:room]
        job.given += len(given)
        if row.drafts:
            self._verified(row, len(given))
        failure = request.emit(given)
        if stops and len(tokens) <= room:
            self._end(job, "eos")
        elif len(tokens) >= room:
            self._end(job, "length")
        elif failure is not None:
            self._end(job, "error", failure)

    def _verified(self, row: Row, tokens: int) -> None:
        self.verified += 1
        self.given += tokens
        row.job.computed -= row.drafts + 1 - tokens
        row.job.sampled += tokens - 1

    def _take(self, job: Job, most: int) -> Row:
        prompt = len(job.request.prompt)
        start, drafts = job.computed, 0 if job.in_prompt else self._drafts
        stop = min(start + most, prompt) if job.in_prompt else start + 1 + drafts
        row = Row(job, start, stop, samples=stop >= prompt, drafts=drafts)
        job.computed = stop
        job.sampled += row.samples
        job.in_flight += 1
        return row

    def _admit(self) -> Job | None:
        if not self._waiting or not self._request_slots:
            return None
        pages = self.pages.take(self._pages_of(self._waiting[0].request))
        if pages is None:
            # Nobody behind it is let past: it would wait for ever.
            return None
        job = self._waiting.popleft()
        job.pages, job.request_slot = array("i", pages), self._request_slots.pop()
        self._running.append(job)
        return job

    def _pages_of(self, request: Request) -> int:
        # The last token is never fed to the model, so it needs no place; drafts behind the one before it do.
        return -(-(len(request.prompt) + request.max_new_tokens - 1 + self._drafts) // self._page_size)

    def _end(self, job: Job, reason: str, error: RequestError | None = None) -> None:
        job.request.finish(reason, error)
        if job.request_slot < 0:
            self._waiting.remove(job)
        self._release_if_left(job)

    def _release_if_left(self, job: Job) -> None:
        """Free what a finished request has, once no step in flight writes to it."""
        if job.request.finished and not job.in_flight and job.request_slot >= 0:
            self._running.remove(job)
            self.pages.give_back(job.pages)
            self._request_slots.append(job.request_slot)
            job.pages, job.request_slot = _no_pages(), -1
