"""A request of continuous batching."""

import asyncio
import contextlib
from typing import Any

import pytest
import tiny_models
import torch
from small_batchers import EOS, LENGTH, LONG, PROMPTS, WAYS, collect, failing, make, submit_all, tokens

from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.batching import BatcherError, Request, RequestError


def test_a_cancelled_request_gets_no_more_and_the_others_all():
    expected = tokens(new_tokens=24)
    with make(max_batch=4) as batcher:
        found = submit_all(batcher, 24)
        for _ in range(4):
            batcher.step()
        seen = {}
        for index in (0, 6, 7):  # running, in its prompt or just behind it, and waiting
            batcher.cancel(found[index])
            seen[index] = list(found[index].tokens)
        batcher.step()
        batcher.step()
        assert all(found[index].tokens == seen[index] for index in seen)
        batcher.run()
        for index, request in enumerate(found):
            if index in seen and len(seen[index]) < len(expected[index]):
                assert (request.tokens, request.finish_reason) == (seen[index], "cancelled")
            else:
                assert request.result() == expected[index]


def test_a_request_of_another_batcher_is_not_cancelled():
    with make() as other:
        theirs = other.submit(PROMPTS[0], max_new_tokens=4)
    with (
        make() as batcher,
        pytest.raises(RequestError, match="another batcher's; call cancel of the batcher"),
    ):
        batcher.cancel(theirs)


def test_streams_share_the_batcher():
    expected = tokens()

    async def main(batcher: ContinuousBatcher) -> list[list[int]]:
        streams = [collect(batcher.stream(prompt, max_new_tokens=20, seed=seed)) for seed, prompt in enumerate(PROMPTS)]
        first = await asyncio.gather(*streams[:5])
        return [*first, *await asyncio.gather(*streams[5:])]

    with make() as batcher:
        assert asyncio.run(main(batcher)) == expected
        # Another event loop, later.
        assert asyncio.run(main(batcher)) == expected


def test_a_request_can_be_iterated_over_by_several_and_afterwards():
    async def main(batcher: ContinuousBatcher) -> None:
        request = batcher.submit(PROMPTS[0], max_new_tokens=20)
        batcher.start()
        assert await asyncio.gather(collect(request), collect(request)) == [expected, expected]
        assert await collect(request) == expected

    expected = tokens()[0]
    with make() as batcher:
        asyncio.run(main(batcher))


def test_an_event_loop_that_ends_leaves_the_rest_to_the_next():
    async def first(batcher: ContinuousBatcher) -> None:
        batcher.start()
        async for _ in left:
            break

    async def second(batcher: ContinuousBatcher) -> list[int]:
        return await collect(batcher.stream([3], max_new_tokens=5))

    with make(**LONG) as batcher:
        left = batcher.submit([1, 2], max_new_tokens=900)
        asyncio.run(first(batcher))
        seen = len(left.tokens)
        assert 0 < seen < 900
        assert len(asyncio.run(second(batcher))) == 5
        assert seen + 5 <= len(left.tokens) < 900


def test_leaving_a_stream_early_cancels_it():
    submitted: list[Request] = []

    async def main(batcher: ContinuousBatcher) -> None:
        submit = batcher.submit

        def submit_and_keep(*args: Any, **kwargs: Any) -> Request:
            submitted.append(submit(*args, **kwargs))
            return submitted[-1]

        batcher.submit = submit_and_keep
        async with contextlib.aclosing(batcher.stream([1, 2], max_new_tokens=900)) as stream:
            async for _ in stream:
                break
        await collect(batcher.stream([3], max_new_tokens=5))

    with make(**LONG) as batcher:
        free = batcher.free_pages
        asyncio.run(main(batcher))
        assert [request.finish_reason for request in submitted] == ["cancelled", "length"]
        batcher.run()
        assert batcher.free_pages == free


@pytest.mark.parametrize("way", ["synchronous", "asynchronous", "two steps ahead"])
@pytest.mark.parametrize("calls", [{1}, {2, 3}, {4}, {5, 6, 7, 8}, {9}])
def test_a_step_without_memory_fails_one_request_and_the_others_go_on(calls: set[int], way: str):
    expected = tokens(max_batch=4)
    with make(max_batch=4, **WAYS[way]) as batcher:
        free = batcher.free_pages
        found = submit_all(batcher)
        with failing(tiny_models.model("llama"), calls, torch.OutOfMemoryError("tried to allocate")):
            batcher.run()
        assert batcher.free_pages == free
    failed = [request for request in found if request.error is not None]
    assert len(failed) == len(calls)
    for request, whole in zip(found, expected, strict=True):
        if request.error is None:
            assert request.result() == whole
        else:
            assert request.tokens == whole[: len(request.tokens)]
            with pytest.raises(RequestError, match=r"memory is too small for this request .* tried to allocate"):
                request.result()


def test_any_other_failure_ends_all_requests_with_its_reason():
    with make() as batcher:
        found = submit_all(batcher)
        with (
            failing(tiny_models.model("llama"), {5}, ZeroDivisionError("by accident")),
            pytest.raises(ZeroDivisionError),
        ):
            batcher.run()
        assert not batcher.busy
        reasons = {str(request.error) for request in found if request.finish_reason == "error"}
        assert reasons == {"the batcher stopped at ZeroDivisionError: by accident"}
        assert all(request.finished for request in found)
        with pytest.raises(BatcherError, match="the batcher stopped at ZeroDivisionError: by accident; make another"):
            batcher.submit([1])


def test_a_failure_reaches_who_iterates():
    async def main(batcher: ContinuousBatcher) -> None:
        await collect(batcher.stream(PROMPTS[0], max_new_tokens=20))

    with (
        make(eos_token_id=[]) as batcher,
        failing(tiny_models.model("llama"), {3}, ZeroDivisionError("by accident")),
        pytest.raises(RequestError, match="the batcher stopped at ZeroDivisionError: by accident"),
    ):
        asyncio.run(main(batcher))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([1] * 60, {"max_new_tokens": 5}, "60 tokens and max_new_tokens is 5, together more than max_length, 64"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ([1], {"temperature": -1.0}, "temperature is -1.0; it must be 0, which is greedy, or from 0.01 to 3.4e\\+38"),
        ([1], {"temperature": 0.001}, "temperature is 0.001; it must be 0"),
        ([1], {"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ([1], {"temperature": None}, "temperature is None; it must be a number"),
        ([1], {"seed": 1 << 63}, "seed is 9223372036854775808; it must fit into 64 bits"),
        ([1, 99], {}, "the prompt has token 99; the model's vocabulary is 0 to 12"),
        (torch.tensor([[3, 4], [5, 6]]), {}, r"the prompt has the shape \(2, 2\); submit each row on its own"),
        ([3.7, 4.2], {}, r"the prompt is \[3.7, 4.2\]; it must be whole numbers, or text"),
        ([[3, 4]], {}, "it must be whole numbers, or text"),
        (None, {}, "the prompt is None; it must be whole numbers, or text"),
        ("abc", {}, "the prompt is text, and the batcher has no tokenizer; give token ids"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_and_the_others_go_on(
    prompt: Any, options: dict[str, Any], message: str
):
    expected = tokens()[0]
    with make() as batcher:
        good = batcher.submit(PROMPTS[0], max_new_tokens=20)
        batcher.step()
        with pytest.raises(RequestError, match=message):
            batcher.submit(prompt, **({"max_new_tokens": 4} | options))
        batcher.run()
        assert good.result() == expected


def test_a_request_larger_than_the_cache_is_refused():
    with (
        make(cache_tokens=32, page_size=16) as batcher,
        pytest.raises(RequestError, match="may need 3 pages of 16 tokens, and the cache has 2; make the batcher with"),
    ):
        batcher.submit([1] * 20, max_new_tokens=20)


def test_a_prompt_may_be_a_tensor():
    prompt = torch.tensor(PROMPTS[3])
    with make() as batcher:
        found = [batcher.submit(each, max_new_tokens=4) for each in (prompt, prompt[None], list(prompt))]
    assert [each.prompt for each in found] == [tuple(PROMPTS[3])] * 3


def test_without_a_length_the_model_s_positions_bound_it():
    with ContinuousBatcher(tiny_models.model("gpt2"), config=BatcherConfig(max_batch=1)) as batcher:
        batcher.submit([1] * 1000, max_new_tokens=24)
        with pytest.raises(RequestError, match="together more than max_length, 1024; shorten"):
            batcher.submit([1] * 1000, max_new_tokens=25)


def test_text_goes_through_the_tokenizer():
    with make(tokenizer=None) as plain:
        expected = plain.submit([1, 2, 3], max_new_tokens=8)
        plain.run()
    config = BatcherConfig(max_batch=1, max_length=LENGTH, eos_token_id=EOS)
    with ContinuousBatcher(tiny_models.model("llama"), tiny_models.tokenizer(), config) as batcher:
        found = batcher.submit("bcd", max_new_tokens=8)
        batcher.run()
    assert found.prompt == (1, 2, 3)
    assert found.result() == expected.result()


def test_a_result_is_not_there_before_the_end():
    with make() as batcher:
        request = batcher.submit([1, 2], max_new_tokens=4)
        with pytest.raises(RequestError, match="not finished; run the batcher, or iterate over the request"):
            request.result()
