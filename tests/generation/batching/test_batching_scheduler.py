"""The scheduler of continuous batching against a device that tells what a step gave some steps late. No tensors."""

import random
from collections import deque

import pytest
from caller_faults import given_from

from vllm_async_spec.generation.batching.pages import NULL_PAGE, PageAllocator
from vllm_async_spec.generation.batching.request import Request, RequestError
from vllm_async_spec.generation.batching.scheduler import Row, Scheduler, Step

PAGE, BATCH, LENGTH, PAGES = 4, 4, 40, 24


def whole(request: Request) -> list[int]:
    tokens, _ = given_from(request.prompt, len(request.prompt), request.max_new_tokens)
    return tokens


def make(pages: int = PAGES, **options: int) -> Scheduler:
    settings = {
        "page_size": PAGE,
        "max_batch": BATCH,
        "max_length": LENGTH,
        "max_prefill_tokens": 8,
        "max_prefills": 2,
    }
    return Scheduler(PageAllocator(pages + 1), **(settings | options))


class LateDevice:
    """Runs steps, tells of each `late` steps later, accepts random drafts; only it knows how far requests are."""

    def __init__(self, scheduler: Scheduler, late: int, drafts: int = 0) -> None:
        self.scheduler = scheduler
        self.late = late
        self.drafts = drafts
        self.choose = random.Random(drafts)
        self.computed: dict[int, int] = {}
        """Tokens of each job that are really computed, but for its last."""
        self.in_flight: deque[Step] = deque()
        self.too_many = 0
        """Rows that were computed for a request that had already ended."""

    def step(self) -> None:
        step = self.scheduler.plan()
        if step is not None:
            self.check(step)
            self.in_flight.append(step)
        if self.in_flight and (step is None or len(self.in_flight) > self.late):
            self.tell()

    def tell(self) -> None:
        step = self.in_flight.popleft()
        results = []
        for row in step.rows:
            prompt, first = row.job.request.prompt, row.stop
            if row.start >= len(prompt):
                computed = self.computed[id(row.job)]
                assert computed <= row.start <= computed + self.drafts * self.late, (
                    "off by the drafts in flight at most"
                )
                first = min(computed, row.job.last) + 1
            count = 1 + (self.choose.randint(0, row.drafts) if row.drafts else 0)
            self.computed[id(row.job)] = first + count - 1
            results.append(given_from(prompt, first, count))
            self.too_many += row.samples and row.job.request.finished
        self.scheduler.apply_results(step.rows, results)

    def check(self, step: Step) -> None:
        rows = step.rows
        assert len({row.job.request_slot for row in rows}) == len(rows) <= BATCH
        assert sum(row.stop - row.start for row in step.prefills) <= 8
        assert len(step.prefills) <= 2
        for row in rows:
            unknown = sum(other.job is row.job and other.samples for each in self.in_flight for other in each.rows)
            tokens = len(row.job.request.tokens) + unknown
            assert tokens < row.job.request.max_new_tokens, "what is in flight already gives all that is asked for"
        owners: dict[int, Request] = {}
        for row in [row for flying in (*self.in_flight, step) for row in flying.rows]:
            request = row.job.request
            start = min(row.start, row.job.last)
            stop = start + row.stop - row.start
            assert 0 <= start < stop <= len(request.prompt) + request.max_new_tokens - 1 + self.drafts
            assert self.drafts or (start, stop) == (row.start, row.stop)
            assert stop <= len(row.job.pages) * PAGE
            for page in row.job.pages:
                assert page != NULL_PAGE
                assert owners.setdefault(page, request) is request, "two requests have a page that a step writes to"

    def finish(self) -> None:
        while self.scheduler.busy or self.in_flight:
            self.step()


def random_request(choose: random.Random) -> Request:
    prompt = tuple(choose.randrange(100) for _ in range(choose.randint(1, 20)))
    return Request(prompt, choose.randint(1, LENGTH - len(prompt)))


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_ten_thousand_operations_leave_all_pages_free(late: int, drafts: int):
    choose = random.Random(late)
    device = LateDevice(make(drafts=drafts), late, drafts)
    scheduler = device.scheduler
    requests: list[Request] = []
    unfinished: list[Request] = []
    failed: set[int] = set()
    for _ in range(10_000):
        kind = choose.random()
        unfinished = [request for request in unfinished if not request.finished]
        if kind < 0.2 and len(unfinished) < 12:
            request = random_request(choose)
            scheduler.check(request)
            scheduler.add(request)
            requests.append(request)
            unfinished.append(request)
        elif kind < 0.24 and requests:
            scheduler.cancel(choose.choice(requests[-12:]))
        elif kind < 0.26:
            step = scheduler.plan()
            if step is not None:
                rows = step.prefills or step.decodes
                scheduler.undo(rows)
                failed.add(id(rows[-1].job.request))
                scheduler.fail(rows[-1].job, RequestError("no memory"))
                kept = Step([], []) if rows is step.decodes else Step(step.decodes, [])
                if kept.rows:
                    device.check(kept)
                    device.in_flight.append(kept)
        else:
            device.step()
        while len(device.in_flight) > late:
            device.tell()
    device.finish()
    assert scheduler.pages.free == PAGES
    reasons = {reason: [each for each in requests if each.finish_reason == reason] for reason in REASONS}
    assert sum(map(len, reasons.values())) == len(requests) > 500
    assert all(len(each) > 20 for each in reasons.values())
    for request in reasons["eos"] + reasons["length"]:
        assert request.tokens == whole(request)
    for request in reasons["cancelled"] + reasons["error"]:
        assert request.tokens == whole(request)[: len(request.tokens)]
    assert {id(request) for request in reasons["error"]} <= failed
    assert (device.too_many > 0) == (late > 0)
    if drafts:
        assert 1 < scheduler.given / scheduler.verified < 1 + drafts


REASONS = ("eos", "length", "cancelled", "error")


def test_a_finished_request_keeps_its_pages_until_no_step_writes_to_them():
    device = LateDevice(make(), late=2)
    found = (random_request(random.Random(seed)) for seed in range(999))
    request = next(each for each in found if len(whole(each)) == 3 and each.max_new_tokens > 6)
    device.scheduler.add(request)
    kept = []
    while not request.finished or device.scheduler.pages.free < PAGES:
        device.step()
        if request.finished:
            kept.append(PAGES - device.scheduler.pages.free)
    assert kept[:2] == [kept[0]] * 2 != [0, 0]
    assert kept[-1] == 0
    assert device.too_many == 2
    assert request.tokens == whole(request)


def test_nobody_is_let_past_a_request_that_waits_for_pages():
    device = LateDevice(make(pages=10), late=1)
    first, large, small = Request((1,) * 20, 5), Request((2,) * 20, 20), Request((3,), 1)
    for request in (first, large, small):
        device.scheduler.add(request)
    order = []
    while device.scheduler.busy:
        device.step()
        order += [each for each in (first, large, small) if each.finished and each not in order]
    assert order == [first, large, small]
    assert device.scheduler.pages.free == 10


def test_a_prompt_longer_than_a_step_takes_several_and_gives_one_token():
    scheduler = make()
    request = Request(tuple(range(19)), 1)
    scheduler.add(request)
    rows: list[Row] = []
    while (step := scheduler.plan()) is not None:
        rows += step.rows
    assert [(row.start, row.stop, row.samples) for row in rows] == [(0, 8, False), (8, 16, False), (16, 19, True)]
    scheduler.apply_results(rows, [([9], True), ([9], True), ([3], False)])
    assert (request.tokens, request.finish_reason) == ([3], "length")
    assert scheduler.pages.free == PAGES


def test_pages_are_given_back_once_and_by_whoever_has_them():
    pages = PageAllocator(4)
    taken = pages.take(2)
    assert taken is not None
    assert NULL_PAGE not in taken
    assert pages.take(2) is None
    pages.give_back(taken)
    assert pages.free == pages.capacity == 3
    with pytest.raises(ValueError, match=f"page {taken[0]} is given back, and no request holds that page"):
        pages.give_back(taken)
    with pytest.raises(ValueError, match="num_pages is 1; it must be at least 2"):
        PageAllocator(1)
