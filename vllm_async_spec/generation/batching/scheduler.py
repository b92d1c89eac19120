"""Plans each step before the results of the steps in flight are known. Plain Python, no tensors.

A request's progress is known when a step is planned: each row that samples adds one token. The host only learns late
whether that token ended the sequence. A row planned in between computes one token too many, which is dropped.

With drafts, a row adds at least one token, and at most one more for each draft. The host learns the number late. Until
then the scheduler's length assumes that all drafts in flight are accepted, and its token count assumes none.

A request holds its slot and all pages that it can ever need. It holds them from the step that admits it to the last
step that writes to them. So no request is preempted, and no page changes owner while a step in flight may write to it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_async_spec.generation.batching.pages import PageAllocator
from vllm_async_spec.generation.batching.request import UNDRAWN, Request, RequestError


def _no_pages() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Job:
    """A request with the scheduler's counts, which include the steps in flight."""

    request: Request
    request_slot: int = -1
    """Where the device keeps the request's last token; -1 before admission."""
    pages: array[int] = field(default_factory=_no_pages)
    """Pages of the cache, in an array that numpy copies without a look at each element."""
    computed: int = 0
    """Tokens whose keys and values the planned steps write; an upper bound with drafts in flight."""
    sampled: int = 0
    """Tokens that the planned steps sample; a lower bound with drafts in flight."""
    given: int = 0
    """Tokens given to the request so far; the caller may change the list `request.tokens`."""
    in_flight: int = 0
    """Steps with a row of the request whose results are not known yet."""

    @property
    def in_prompt(self) -> bool:
        """Whether part of the prompt is not planned yet."""
        return self.computed < len(self.request.prompt)

    @property
    def may_decode(self) -> bool:
        """Whether a step may add a token, as far as is known."""
        return not self.in_prompt and self.sampled < self.request.max_new_tokens

    @property
    def last(self) -> int:
        """The last position whose token may be fed to the model: the second-last of the sequence."""
        return len(self.request.prompt) + self.request.max_new_tokens - 2


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start` to `stop` (excluded) of a sequence, all in one step."""

    job: Job
    start: int
    stop: int
    samples: bool
    """Whether the row yields a token: only if it reaches the end of the prompt."""
    drafts: int = 0
    """How many of the row's tokens are drafts, each of which may yield one more token."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: decode rows, whose tokens are on the device, and prefill rows."""

    decodes: list[Row]
    prefills: list[Row]

    @property
    def rows(self) -> list[Row]:
        """All rows, decodes first."""
        return self.decodes + self.prefills


class Scheduler:
    """First come, first served: decodes in each step, beside prefills in chunks.

    Args:
        pages: allocates pages of the KV cache.
        page_size: tokens in a page.
        max_batch: requests that run at once.
        max_length: tokens of a sequence, prompt and generated.
        max_prefill_tokens: prompt tokens in a step.
        max_prefills: prompts in a step.
        drafts: drafts of each decode row.
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
        """Rows with drafts whose results are known, and the number of tokens that they gave."""
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
        """Whether a request is unfinished, or a step in flight still has a row of a finished request."""
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

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
                f"max_length, {self._max_length}; shorten one of them, or make the batcher with a larger max_length"
            )
        if self._pages_of(request) > self.pages.capacity:
            raise RequestError(
                f"the request may need {self._pages_of(request)} pages of {self._page_size} tokens, and the cache has "
                f"{self.pages.capacity}; make the batcher with larger cache_tokens"
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` has accepted."""
        self._waiting.append(Job(request))

    def cancel(self, request: Request) -> None:
        """Plan no more of an unfinished request; drop what steps in flight give for it."""
        if request.finished:
            return
        for job in [*self._waiting, *self._running]:
            if job.request is request:
                self._end(job, "cancelled")
                return

    def plan(self) -> Step | None:
        """Plan the next step, which counts as in flight from now on. None if nothing can be computed yet.

        Pass every step to `apply_results`, in order, or its rows to `undo`.
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
        """Apply the results of a step: of each row its tokens, and whether the last one ends the sequence.

        The results of rows that don't sample are ignored.
        """
        for row, (tokens, stops) in zip(rows, results, strict=True):
            row.job.in_flight -= 1
            if row.samples and not row.job.request.finished:
                self._give(row, tokens, stops)
            self._release_if_left(row.job)

    def undo(self, rows: Iterable[Row]) -> None:
        """Take back rows of the newest step, which did not run: the next step has them again."""
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
        """End all requests with an error, once no step will be planned or read any more."""
        for job in [*self._waiting, *self._running]:
            job.in_flight = 0
            self.fail(job, error)
            self._release_if_left(job)

    def _give(self, row: Row, tokens: Sequence[int], stops: bool) -> None:
        job, request = row.job, row.job.request
        if UNDRAWN in tokens:
            reason = "no token can be drawn from the logits of this request, because one of them is NaN or infinite"
            self._end(job, "error", RequestError(f"{reason}; look at the model's weights and dtype"))
            return
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
            # No later request overtakes this one, which could otherwise wait for ever.
            return None
        job = self._waiting.popleft()
        job.pages, job.request_slot = array("i", pages), self._request_slots.pop()
        self._running.append(job)
        return job

    def _pages_of(self, request: Request) -> int:
        # The last token is never fed to the model and needs no place. Drafts after the second-last token do.
        return -(-(len(request.prompt) + request.max_new_tokens - 1 + self._drafts) // self._page_size)

    def _end(self, job: Job, reason: str, error: RequestError | None = None) -> None:
        job.request.finish(reason, error)
        if job.request_slot < 0:
            self._waiting.remove(job)
        self._release_if_left(job)

    def _release_if_left(self, job: Job) -> None:
        """Free the pages and the slot of a finished request, once no step in flight writes to them."""
        if job.request.finished and not job.in_flight and job.request_slot >= 0:
            self._running.remove(job)
            self.pages.give_back(job.pages)
            self._request_slots.append(job.request_slot)
            job.pages, job.request_slot = _no_pages(), -1
