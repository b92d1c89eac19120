"""Who drives a `ContinuousBatcher` that several event loops share, and what becomes of the rest when a loop ends."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from small_batchers import LONG, PROMPTS, collect, make, submit_all
from test_batching_callers import expected, held_in_step, known_before_the_model_is_another_s, stream

from vllm_async_spec.generation import ContinuousBatcher
from vllm_async_spec.generation.batching import BatcherError
from vllm_async_spec.generation.batching.driver import Driver, Work

__all__ = ["known_before_the_model_is_another_s"]
pytestmark = pytest.mark.timeout(120)
"""What goes wrong here is often a wait without an end."""


def test_a_caller_that_blocks_its_event_loop_stops_no_other():
    begun, done = threading.Event(), threading.Event()

    async def blocks(batcher: ContinuousBatcher) -> list[int]:
        found = []
        async for token in stream(batcher, 0):
            found.append(token)
            begun.set()
            assert done.wait(60)
        return found

    async def others(batcher: ContinuousBatcher) -> list[list[int]]:
        first = await asyncio.gather(*(collect(stream(batcher, index)) for index in range(1, 5)))
        # By now the thread that stepped may have ended, and its event loop can't say so.
        return first + [await collect(stream(batcher, index)) for index in range(5, 8)]

    with make() as batcher, ThreadPoolExecutor() as threads:
        slow = threads.submit(asyncio.run, blocks(batcher))
        assert begun.wait(60)
        assert asyncio.run(asyncio.wait_for(others(batcher), 60)) == expected()[1:]
        done.set()
        assert slow.result() == expected()[0]


def test_where_the_event_loop_of_the_driver_ends_another_takes_over():
    async def short(batcher: ContinuousBatcher) -> None:
        async for _ in batcher.stream([1, 2], max_new_tokens=900):
            if others.done() or batcher._driver._followers:
                return

    with make(**LONG) as batcher, ThreadPoolExecutor() as threads:
        others = threads.submit(asyncio.run, asyncio.wait_for(follow_later(batcher), 60))
        asyncio.run(short(batcher))
        assert len(others.result(60)) == 300


async def follow_later(batcher: ContinuousBatcher) -> list[int]:
    while not batcher.busy:
        await asyncio.sleep(0.001)
    return await collect(batcher.stream([5], max_new_tokens=300))


async def start_and_step(batcher: ContinuousBatcher, inside: threading.Event) -> None:
    batcher.start()
    await asyncio.to_thread(inside.wait, 60)


REFUSED = r"^a stopped driver is still in step\(\); start the batcher after that step\(\) returns$"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_driver_restarted_while_the_last_step_runs_is_refused(at_once: bool):
    async def main(batcher: ContinuousBatcher, inside: threading.Event, go: threading.Event) -> None:
        await start_and_step(batcher, inside)
        driver = batcher._driver._current.task
        driver.cancel()
        if not at_once:
            await asyncio.sleep(0.01)
        with pytest.raises(BatcherError, match=REFUSED):
            batcher.start()
        tokens = asyncio.create_task(collect(stream(batcher, 1)))
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.wait([driver])
        assert await tokens == expected()[1]

    with make() as batcher, held_in_step(batcher) as (inside, go):
        found = submit_all(batcher)
        asyncio.run(main(batcher, inside, go))
        batcher.run()
        assert [each.result() for each in found] == expected()


def test_a_driver_is_refused_after_its_event_loop_was_closed_in_the_middle_of_a_step():
    async def again(batcher: ContinuousBatcher, go: threading.Event) -> None:
        with pytest.raises(BatcherError, match=REFUSED):
            batcher.start()
        go.set()
        while batcher._driver._current is not None:
            await asyncio.sleep(0.001)
        batcher.start()
        while batcher.busy:
            await asyncio.sleep(0.001)

    with make() as batcher, held_in_step(batcher) as (inside, go):
        found = submit_all(batcher)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(start_and_step(batcher, inside))
        batcher._driver._current.task._log_destroy_pending = False
        loop.close()
        asyncio.run(again(batcher, go))
        assert [each.result() for each in found] == expected()


def test_what_is_submitted_while_a_driver_leaves_is_driven_by_the_next(monkeypatch: pytest.MonkeyPatch):
    leaving, go, left_to_do = threading.Event(), threading.Event(), []
    stop_driving = Driver._stop_driving

    def late(*args: Any) -> None:
        leaving.set()
        assert go.wait(60)
        stop_driving(*args)

    async def main() -> None:
        driver, work = Driver(), Work(step=left_to_do.pop, busy=lambda: bool(left_to_do))
        driver.follow(work)
        await asyncio.to_thread(leaving.wait, 60)
        left_to_do.append("a step")
        driver.follow(work)
        go.set()
        while left_to_do:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Driver, "_stop_driving", late)
    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_event_loop_ends_after_the_last_step_of_its_driver():
    async def main(batcher: ContinuousBatcher, inside: threading.Event, go: threading.Event) -> None:
        await start_and_step(batcher, inside)
        threading.Timer(0.1, go.set).start()

    with make() as batcher, held_in_step(batcher) as (inside, go):
        found = submit_all(batcher)
        asyncio.run(main(batcher, inside, go))
        assert go.is_set()
        batcher.run()
        assert [each.result() for each in found] == expected()


def test_a_full_executor_of_the_event_loop_does_not_hold_the_batcher_up():
    async def main(batcher: ContinuousBatcher) -> list[int]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        done = threading.Event()
        waits = asyncio.create_task(asyncio.to_thread(done.wait, 60))
        await asyncio.sleep(0.01)
        found = await collect(stream(batcher, 0))
        done.set()
        assert await waits
        return found

    with make() as batcher:
        assert asyncio.run(main(batcher)) == expected()[0]


def test_callers_in_many_threads_at_random():
    async def patient(batcher: ContinuousBatcher, chance: random.Random) -> None:
        index = chance.randrange(len(PROMPTS))
        found = []
        async for token in stream(batcher, index):
            found.append(token)
            if chance.random() < 0.02:
                time.sleep(0.005)
        assert found == expected()[index]

    async def impatient(batcher: ContinuousBatcher, chance: random.Random) -> None:
        enough = chance.randrange(12)
        async for _ in stream(batcher, chance.randrange(len(PROMPTS))):
            enough -= 1
            if enough < 0:
                raise ZeroDivisionError
            if chance.random() < 0.1:
                break

    async def callers(batcher: ContinuousBatcher, chance: random.Random) -> None:
        tasks = [asyncio.create_task(patient(batcher, chance)) for _ in range(chance.randint(0, 2))]
        bad = [asyncio.create_task(impatient(batcher, chance)) for _ in range(2)]
        await asyncio.sleep(chance.random() * 0.02)
        bad[0].cancel()
        await asyncio.gather(*tasks)

    async def closed_in_the_middle(batcher: ContinuousBatcher, chance: random.Random) -> None:
        for _ in range(2):
            task = asyncio.create_task(patient(batcher, chance))
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.sleep(chance.random() * 0.02)
        batcher_task = batcher._driver._current and batcher._driver._current.task
        if batcher_task:
            batcher_task._log_destroy_pending = False

    def thread(batcher: ContinuousBatcher, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(12):
            if chance.random() < 0.3:
                loop = asyncio.new_event_loop()
                loop.run_until_complete(closed_in_the_middle(batcher, chance))
                loop.close()
            else:
                asyncio.run(asyncio.wait_for(callers(batcher, chance), 60))

    with make() as batcher, ThreadPoolExecutor(4) as threads:
        free = batcher.free_pages
        for each in [threads.submit(thread, batcher, seed) for seed in range(4)]:
            each.result()
        while batcher._driver._current is not None:
            time.sleep(0.001)
        batcher.run()
        assert batcher.free_pages == free


def test_a_thread_that_can_not_be_had_leaves_no_driver_behind(monkeypatch: pytest.MonkeyPatch):
    async def main(batcher: ContinuousBatcher) -> list[int]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await collect(stream(batcher, 1))
        assert list(batcher._commands)[1].func.__name__ == "cancel"
        return await collect(stream(batcher, 0))

    def no_thread(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with make() as batcher:
        assert asyncio.run(main(batcher)) == expected()[0]
