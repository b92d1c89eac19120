"""`ContinuousBatcher` and its callers."""

import asyncio
import contextlib
import functools
import gc
import itertools
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny_models
from small_batchers import LONG, PROMPTS, collect, make, submit_all, tokens

from vllm_async_spec.generation import ContinuousBatcher
from vllm_async_spec.generation.batching import BatcherError, Request, RequestError

pytestmark = pytest.mark.timeout(120)
"""What goes wrong here is often a wait without an end."""


@functools.cache
def expected() -> list[list[int]]:
    return tokens()


@pytest.fixture(autouse=True)
def known_before_the_model_is_another_s() -> None:
    expected()


def stream(batcher: ContinuousBatcher, index: int) -> AsyncIterator[int]:
    return batcher.stream(PROMPTS[index], max_new_tokens=20, seed=index)


def begin(loop: asyncio.AbstractEventLoop, request: Request) -> asyncio.Task[Any]:
    """Let an iteration over the request begin and wait in the loop, which then stands still."""

    async def wait() -> None:
        await asyncio.sleep(0.01)

    task = loop.create_task(collect(request))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(wait())
    return task


@contextlib.contextmanager
def during_forward(action: Callable[[], None], call: int = 4) -> Iterator[None]:
    count = itertools.count(1)

    def act(*_: Any) -> None:
        if next(count) == call:
            action()

    handle = tiny_models.model("llama").model.layers[0].register_forward_pre_hook(act)
    try:
        yield
    finally:
        handle.remove()


class DeafLoop(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, *_: Any, **__: Any) -> Any:
        raise OSError("takes nothing")


@pytest.mark.parametrize("kind", ["closed", "raising"])
def test_an_event_loop_that_takes_no_more_ends_its_request_alone(kind: str):
    loop = asyncio.new_event_loop() if kind == "closed" else DeafLoop()
    with make() as batcher:
        free = batcher.free_pages
        found = submit_all(batcher)
        task = begin(loop, found[6])
        loop.close()
        batcher.run()
        assert batcher.free_pages == free
        assert [each.tokens for each in found[:6]] == expected()[:6]
        assert found[7].result() == expected()[7]
        why = "RuntimeError: Event loop is closed" if kind == "closed" else "OSError: takes nothing"
        with pytest.raises(RequestError, match=f"takes no more tokens, because {why}; keep the loop running until"):
            found[6].result()
        assert found[6].tokens == expected()[6][: len(found[6].tokens)]
        assert 0 < len(found[6].tokens) < 20
        # And it takes new ones.
        again = batcher.submit(PROMPTS[0], max_new_tokens=20)
        batcher.run()
        assert again.result() == expected()[0]
    assert not task.done()


def test_an_iteration_that_has_ended_asks_nothing_of_its_loop():
    with make() as batcher:
        found = submit_all(batcher)
        loop = asyncio.new_event_loop()
        task = begin(loop, found[6])
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
        batcher.run()
        assert [each.result() for each in found] == expected()


@contextlib.contextmanager
def held_in_step(batcher: ContinuousBatcher) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The fourth step stands still: events that say that it does, and that it may go on."""
    inside, go = threading.Event(), threading.Event()

    def stand_still() -> None:
        inside.set()
        assert go.wait(60)

    with during_forward(stand_still):
        try:
            yield inside, go
        finally:
            go.set()


def test_closing_inside_a_step_takes_effect_at_its_end():
    with make() as batcher, during_forward(batcher.close):
        found = submit_all(batcher)
        batcher.run()
        assert all(each.finished for each in found)
        assert "the batcher was closed" in {str(each.error) for each in found}
        assert tiny_models.model("llama").config._attn_implementation == "eager"
    with pytest.raises(BatcherError, match="the batcher is closed; make another"):
        batcher.submit([1])


def test_a_signal_s_handler_may_close_the_batcher_whose_step_it_interrupts():
    with make() as batcher, during_forward(lambda: signal.raise_signal(signal.SIGUSR1)):
        before = signal.signal(signal.SIGUSR1, lambda *_: batcher.close())
        try:
            found = submit_all(batcher)
            batcher.run()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert all(each.finished for each in found)


def test_closing_in_another_thread_waits_for_one_step_and_not_for_all():
    with make(**LONG) as batcher, held_in_step(batcher) as (inside, go), ThreadPoolExecutor() as threads:
        found = submit_all(batcher, 900)
        running = threads.submit(batcher.run)
        inside.wait(60)
        closing = threads.submit(batcher.close)
        while batcher._closed is None:
            time.sleep(0.001)
        with pytest.raises(BatcherError, match="the batcher is closed"):
            batcher.submit([1])
        assert not closing.done()
        go.set()
        closing.result(60)
        running.result(60)
        assert max(len(each.tokens) for each in found) < 5
        assert {str(each.error) for each in found} == {"the batcher was closed"}


def test_requests_are_submitted_and_cancelled_inside_a_step():
    more: list[Request] = []

    def act() -> None:
        more.append(batcher.submit(PROMPTS[3], max_new_tokens=20))
        batcher.cancel(found[7])
        with pytest.raises(
            BatcherError, match=r"step\(\) already runs in this thread; let one thread drive the batcher"
        ):
            batcher.step()

    with make() as batcher, during_forward(act):
        found = submit_all(batcher)
        batcher.run()
        assert [each.result() for each in found[:7]] == expected()[:7]
        assert more[0].result() == expected()[3]
        assert found[7].finish_reason == "cancelled"


def test_an_interrupt_in_a_step_ends_all_and_loses_no_page():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with make() as batcher, during_forward(interrupt):
        free = batcher.free_pages
        found = submit_all(batcher)
        with pytest.raises(KeyboardInterrupt):
            batcher.run()
        assert batcher.free_pages == free
        assert not batcher.busy
        assert {str(each.error) for each in found} == {"the batcher stopped at KeyboardInterrupt"}
    assert tiny_models.model("llama").config._attn_implementation == "eager"


def test_an_interrupt_loses_no_request_that_was_just_submitted(monkeypatch: pytest.MonkeyPatch):
    with make() as batcher:
        add, calls = batcher._scheduler.add, itertools.count()

        def interrupted(request: Request) -> None:
            if next(calls) == 1:
                raise KeyboardInterrupt
            add(request)

        monkeypatch.setattr(batcher._scheduler, "add", interrupted)
        found = submit_all(batcher)
        with pytest.raises(KeyboardInterrupt):
            batcher.step()
        assert [each.finish_reason for each in found] == ["error"] * len(PROMPTS)


def test_a_cancellation_that_fails_leaves_no_request_waiting(monkeypatch: pytest.MonkeyPatch):
    def fails(_: Request) -> None:
        raise ZeroDivisionError

    with make() as batcher:
        monkeypatch.setattr(batcher._scheduler, "cancel", fails)
        found = submit_all(batcher)
        with pytest.raises(TypeError, match="request is None; it must be a Request, which submit returns"):
            batcher.cancel(None)  # type: ignore[arg-type]
        batcher.cancel(found[0])
        found.append(batcher.submit([1], max_new_tokens=4))
        with pytest.raises(ZeroDivisionError):
            batcher.run()
        assert [each.finish_reason for each in found] == ["error"] * len(found)
    assert tiny_models.model("llama").config._attn_implementation == "eager"


def test_a_device_that_fails_while_the_batcher_is_closed_leaves_the_model_to_others(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise ZeroDivisionError

    batcher = make()
    monkeypatch.setattr(batcher._streams, "drain", fails)
    with pytest.raises(ZeroDivisionError):
        batcher.close()
    assert tiny_models.model("llama").config._attn_implementation == "eager"
    batcher.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 4.0}, "max_new_tokens is 4.0; it must be a whole number"),
        ({"seed": 0.5}, "seed is 0.5; it must be a whole number"),
    ],
)
def test_what_a_step_would_fail_at_is_refused_before(options: dict[str, Any], message: str):
    with make() as batcher, pytest.raises(RequestError, match=message):
        batcher.submit([1, 2], **options)


def test_a_caller_may_take_tokens_off_its_request():
    with make() as batcher:
        found = submit_all(batcher)
        taken: list[list[int]] = [[] for _ in found]
        for _ in range(500):
            batcher.step()
            for request, tokens in zip(found, taken, strict=True):
                while request.tokens:
                    tokens.append(request.tokens.pop(0))
        assert [tokens + request.tokens for request, tokens in zip(found, taken, strict=True)] == expected()
    assert {request.finish_reason for request in found} == {"eos", "length"}


def test_an_iteration_whose_tokens_were_taken_off_lets_its_event_loop_go_on():
    async def main() -> None:
        request = Request((1,), 5)
        request.emit([3, 4])
        tokens = aiter(request)
        assert [await anext(tokens), await anext(tokens)] == [3, 4]
        request.tokens.clear()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(tokens), 0.1)

    asyncio.run(main())


def test_an_event_loop_that_closes_just_when_its_iteration_has_ended_ends_nothing():
    first, second = asyncio.Event(), asyncio.Event()
    request = Request((1,), 5)

    class Ends:
        def call_soon_threadsafe(self, _: Any) -> None:
            del request._listeners[second]

    class Closed:
        def call_soon_threadsafe(self, _: Any) -> None:
            raise RuntimeError("Event loop is closed")

    request._listeners = {first: Ends(), second: Closed()}  # type: ignore[dict-item]
    assert request.emit([3]) is None
    assert list(request._listeners) == [first]


def test_the_error_of_one_caller_holds_nothing_of_another():
    """Each raise adds frames to an error, and they hold what their callers had."""
    with make() as batcher:
        found = batcher.submit([1, 2], max_new_tokens=4)
    for _ in range(3):
        with pytest.raises(RequestError, match="the batcher was closed"):
            found.result()
    assert found.error is not None
    assert found.error.__traceback__ is None


@pytest.mark.parametrize("closed", [True, False])
def test_a_batcher_s_memory_goes_when_it_is_closed_or_with_the_last_reference(closed: bool):
    batcher = make()
    assert asyncio.run(collect(stream(batcher, 0))) == expected()[0]
    gone = weakref.ref(batcher._in_flight._runner)
    gc.disable()
    try:
        if closed:
            batcher.close()
        else:
            del batcher
        # The thread that has run the last step lets go of it a moment after it has said so.
        for _ in range(1000):
            if gone() is None:
                break
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()
