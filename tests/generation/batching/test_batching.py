"""Continuous batching against `generate` of transformers and against itself, on a device that is late."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

import tiny_models
import transformers
from generating import batcher_of
from late_device import LateStreams

from vllm_async_spec import sync_policy
from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.batching import (
    AttentionChoiceError,
    BatcherError,
    ModelError,
    Request,
    RequestError,
)
from vllm_async_spec.generation.batching.sampling import gumbel_noise, sample

EOS = [2, 5]
LENGTH = 64


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(1, tiny_models.VOCABULARY) for _ in range(length)] for length in lengths]


LENGTHS = [3, 1, 9, 20, 5, 7, 40, 2]
PROMPTS = prompts(LENGTHS)


def generated(kind: str, prompt: list[int], new_tokens: int, eos: Sequence[int] = EOS) -> list[int]:
    """What transformers' own loop makes of one prompt, greedily."""
    ids = torch.tensor([prompt])
    made = tiny_models.model(kind).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return made[0, len(prompt) :].tolist()


def make(kind: str = "llama", **options: Any) -> ContinuousBatcher:
    settings = {"max_batch": 3, "max_length": LENGTH, "max_prefill_tokens": 16, "eos_token_id": EOS}
    return batcher_of(tiny_models.model(kind), **(settings | options))


def tokens(kind: str = "llama", temperature: float = 0.0, new_tokens: int = 20, **options: Any) -> list[list[int]]:
    with make(kind, **options) as batcher:
        free = batcher.free_pages
        found = [
            batcher.submit(prompt, max_new_tokens=new_tokens, temperature=temperature, seed=seed)
            for seed, prompt in enumerate(PROMPTS)
        ]
        batcher.run()
        assert batcher.free_pages == free
        return [request.result() for request in found]


WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {"synchronous": True},
    "asynchronous": {},
    "two steps ahead": {"steps_ahead": 2},
    "late": {"open_streams": LateStreams().open},
    "late, two steps ahead": {"open_streams": LateStreams().open, "steps_ahead": 2},
    "late now and then": {"open_streams": LateStreams(seed=0).open},
    "one prompt a step": {"max_prefills": 1, "decode_sizes": [3]},
    "all at once": {"max_batch": 8, "max_prefill_tokens": 100},
    "small cache": {"cache_tokens": LENGTH, "page_size": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding"])
def test_the_tokens_are_those_of_generate(kind: str, way: str):
    expected = [generated(kind, prompt, 20) for prompt in PROMPTS]
    assert len({len(each) for each in expected}) > 2, "some end early, and some don't"
    assert tokens(kind, **WAYS[way]) == expected


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    new_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7]),
    ahead=st.integers(1, 3),
    batch=st.integers(1, 5),
    page_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 99),
)
def test_the_tokens_are_the_synchronous_ones(
    lengths: list[int], new_tokens: int, temperature: float, ahead: int, batch: int, page_size: int, seed: int
):
    found = []
    streams = LateStreams(seed)
    for way in ({"synchronous": True}, {"steps_ahead": ahead, "open_streams": streams.open}):
        with make(max_batch=batch, page_size=page_size, **way) as batcher:
            requests = [
                batcher.submit(prompt, max_new_tokens=new_tokens, temperature=temperature, seed=index)
                for index, prompt in enumerate(prompts(lengths, seed))
            ]
            batcher.run()
            found.append([(request.result(), request.finish_reason) for request in requests])
    assert found[0] == found[1]


def test_nothing_waits_but_for_the_step_before():
    """Under the policy that refuses every copy; of a late device's steps, each is waited for once."""
    streams = LateStreams()
    with make(open_streams=streams.open) as batcher, sync_policy("error"):
        batcher.submit([1, 2, 3], max_new_tokens=12)
        steps = 0
        while batcher.busy:
            batcher.step()
            steps += 1
    assert 0 < streams.waits <= steps


def test_a_row_computed_too_late_to_matter_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """Ahead by one step, each sequence that ends early is computed once more, and nobody sees it."""
    rows = {}
    for way in ({"synchronous": True}, {}, {"steps_ahead": 2}):
        with make(max_batch=8, **way) as batcher:
            counted = itertools.count()
            plan = batcher._scheduler.plan

            def counting(plan=plan, counted=counted):
                step = plan()
                for _ in step.rows if step else ():
                    next(counted)
                return step

            monkeypatch.setattr(batcher._scheduler, "plan", counting)
            found = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
            batcher.run()
            early = [each for each in found if each.finish_reason == "eos" and len(each.tokens) < 18]
            rows[str(way)] = next(counted)
    first, second, third = rows.values()
    assert len(early) > 2
    assert (second - first, third - first) == (len(early), 2 * len(early))


def test_sampling_depends_on_the_seed_and_not_on_the_company():
    expected = tokens(temperature=1.0, new_tokens=24, max_batch=1)
    assert tokens(temperature=1.0, new_tokens=24) == expected
    assert tokens(temperature=1.0, new_tokens=24, synchronous=True, max_batch=8) == expected
    assert tokens(temperature=0.0, new_tokens=24) != expected


def test_a_greedy_request_is_greedy_beside_sampled_ones():
    expected = tokens()
    with make(max_batch=8) as batcher:
        found = [
            batcher.submit(prompt, max_new_tokens=20, temperature=2.0 * (index % 2))
            for index, prompt in enumerate(PROMPTS)
        ]
        batcher.run()
        same = [request.result() == each for request, each in zip(found, expected, strict=True)]
    assert all(same[::2])
    assert not all(same[1::2])


def test_samples_are_of_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    rows = 20_000
    drawn = sample(
        logits.expand(rows, -1), torch.full((rows,), 0.8), torch.arange(rows), torch.full((rows,), 3, dtype=torch.int32)
    )
    shares = drawn.bincount(minlength=4) / rows
    torch.testing.assert_close(shares, (logits / 0.8).softmax(-1), atol=0.015, rtol=0)


def test_noise_of_neighbours_is_not_related():
    """Of seeds, positions and tokens side by side; a correlation of 0.03 would be four standard deviations."""
    seeds, positions = torch.arange(150).repeat_interleave(2), torch.arange(2).repeat(150)
    noise = gumbel_noise(seeds, positions, 128).view(150, 2, 128)
    assert noise.isfinite().all()
    for one, other in (
        (noise[:-1], noise[1:]),
        (noise[:, 0], noise[:, 1]),
        (noise[..., :-1], noise[..., 1:]),
    ):
        related = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(related)) < 0.03


def test_a_cancelled_request_gets_no_more_and_the_others_all():
    expected = tokens(new_tokens=24)
    with make(max_batch=4) as batcher:
        found = [batcher.submit(prompt, max_new_tokens=24) for prompt in PROMPTS]
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


async def collect(tokens: Any) -> list[int]:
    return [token async for token in tokens]


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


LONG = {"max_length": 1000, "eos_token_id": []}
"""For requests that don't end by themselves while a test looks."""


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


@contextlib.contextmanager
def failing(model: Any, calls: set[int], error: Exception) -> Iterator[None]:
    """Let the model's calls of these numbers fail, after its first layer has written its keys and values."""
    count = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(count) in calls:
            raise error

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("way", ["synchronous", "asynchronous", "two steps ahead"])
@pytest.mark.parametrize("calls", [{1}, {2, 3}, {4}, {5, 6, 7, 8}, {9}])
def test_a_step_without_memory_fails_one_request_and_the_others_go_on(calls: set[int], way: str):
    expected = tokens(max_batch=4)
    with make(max_batch=4, **WAYS[way]) as batcher:
        free = batcher.free_pages
        found = [batcher.submit(prompt, max_new_tokens=20, seed=seed) for seed, prompt in enumerate(PROMPTS)]
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
        found = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
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
        ([1], {"temperature": -1.0}, "temperature is -1.0; it must be 0, which is greedy, or at least 0.01"),
        ([1], {"temperature": 0.001}, "temperature is 0.001; it must be 0"),
        ([1], {"seed": 1 << 63}, "seed is 9223372036854775808; it must fit into 64 bits"),
        ([1, 99], {}, "the prompt has token 99; the model's vocabulary is 0 to 12"),
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
    with make() as batcher:
        found = batcher.submit(torch.tensor(PROMPTS[3]), max_new_tokens=4)
    assert found.prompt == tuple(PROMPTS[3])


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


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [("llama", True), ("llama", "aot_eager"), ("gpt2", {"backend": "eager"}), ("sliding", "eager")],
)
def test_compiled_decodes_give_the_same_tokens(kind: str, compiled: Any):
    expected = tokens(kind)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert tokens(kind, torch_compile=compiled, decode_sizes=[1, 3]) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for each size, whole"


def test_as_many_sizes_are_compiled_as_there_are():
    """PyTorch's own limit is eight, and what is beyond it would run as it is without a word."""
    sizes = list(range(1, 12))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with make(max_batch=11, decode_sizes=sizes, torch_compile="eager"):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(sizes)


def test_a_model_that_can_not_be_compiled_is_told_so():
    model = tiny_models.model("llama")
    with pytest.raises(ValueError, match="forward of LlamaForCausalLM can't be compiled; give torch_compile=False: "):
        make(torch_compile={"backend": "refusing"})
    assert model.config._attn_implementation == "eager"


@torch._dynamo.register_backend(name="refusing")
def refuse(*_: Any) -> Any:
    raise NotImplementedError("this backend compiles nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0; it must be at least 1"),
        ({"max_length": -1}, "max_length is -1; it must be at least 1"),
        ({"max_length": 4096}, "max_length is 4096 and the model has 2048 positions; give at most 2048"),
        ({"page_size": 0}, "page_size is 0; it must be at least 1"),
        ({"steps_ahead": 0}, "steps_ahead is 0; it must be at least 1"),
        (
            {"decode_sizes": [1, 2]},
            r"decode_sizes is \[1, 2\]; the sizes must be positive, and the largest must be max_batch, 3",
        ),
        ({"cuda_graphs": True}, "cuda_graphs is True and the model is on cpu; leave out cuda_graphs, or move"),
        (
            {"torch_compile": {"mode": "reduce-overhead"}},
            "makes its own CUDA graphs, but this package already captures",
        ),
        ({"torch_compile": 2}, "torch_compile is 2; it must be bool or str or dict"),
        ({"torch_compile": "fast"}, "torch_compile has the backend 'fast', which PyTorch does not know; leave out"),
        ({"attention": "FAST"}, "attention is 'FAST'; it must be auto, FLASH_ATTN, FLASHINFER_TRTLLM, TORCH_REFERENCE"),
        ({"attention": "FLASH_ATTN"}, "FLASH_ATTN needs a CUDA device, and the model is on cpu"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], message: str):
    model = tiny_models.model("llama")
    with pytest.raises((ValueError, AttentionChoiceError), match=message):
        make(**options)
    assert model.config._attn_implementation == "eager"


def test_the_settings_may_still_be_keyword_arguments():
    expected = tokens()
    message = r"this release only: give max_batch, max_length, eos_token_id in a config, as in .*BatcherConfig"
    with pytest.warns(DeprecationWarning, match=message) as told:
        batcher = ContinuousBatcher(tiny_models.model("llama"), max_batch=3, max_length=LENGTH, eos_token_id=EOS)
    assert [(each.category, each.filename) for each in told] == [(DeprecationWarning, __file__)]
    with batcher:
        found = [batcher.submit(prompt, max_new_tokens=20, seed=index) for index, prompt in enumerate(PROMPTS)]
        batcher.run()
    assert [request.result() for request in found] == expected


def test_settings_that_are_none_are_refused():
    model, config = tiny_models.model("llama"), BatcherConfig(max_batch=3)
    with pytest.raises(TypeError, match=r"needs a config, such as BatcherConfig\(max_batch=8\)"):
        ContinuousBatcher(model)
    with pytest.raises(TypeError, match="a config and max_length, synchronous were given; put all settings into"):
        ContinuousBatcher(model, config=config, max_length=9, synchronous=True)
    with (
        pytest.warns(DeprecationWarning, match="in a config"),
        pytest.raises(TypeError, match="unexpected keyword argument 'max_batches'"),
    ):
        ContinuousBatcher(model, max_batch=3, max_batches=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_batch = 4  # type: ignore[misc]
    assert model.config._attn_implementation == "eager"


def test_a_model_that_can_not_be_batched_is_told_why():
    with pytest.raises(ModelError, match="T5ForConditionalGeneration has an encoder; only decoder-only models"):
        make("encoder-decoder")
    with pytest.raises(ModelError, match="Gemma2Attention attends with softcap, which no adapter supports"):
        make("hybrid")
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=13, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(
        ModelError, match=r"BloomForCausalLM does not use transformers' AttentionInterface, .* use model.generate"
    ):
        ContinuousBatcher(bloom.eval(), config=BatcherConfig(max_batch=1))


def test_a_cache_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr("vllm_async_spec.generation.batching.batcher.PagedCache", no_memory)
    with pytest.raises(
        BatcherError, match=r"a KV cache of 208 tokens does not fit .*; give smaller cache_tokens, .* tried"
    ):
        make(page_size=16)
    assert tiny_models.model("llama").config._attn_implementation == "eager"


def test_a_model_in_training_mode_is_refused():
    model = tiny_models.model("llama")
    model.train()
    try:
        with pytest.raises(ModelError, match="is in training mode, so dropout is active; call the model's eval"):
            make()
    finally:
        model.eval()


def test_the_model_belongs_to_one_batcher_until_that_is_closed():
    model = tiny_models.model("llama")
    with make() as batcher:
        with pytest.raises(ModelError, match="belongs to a ContinuousBatcher; close that batcher first"):
            make()
        with pytest.raises(RuntimeError, match=r"belongs to a ContinuousBatcher; call the batcher's close\(\)"):
            model(input_ids=torch.tensor([[1]]))
        left = batcher.submit([1, 2], max_new_tokens=40)
        batcher.step()
    batcher.close()
    assert (left.finish_reason, str(left.error)) == ("error", "the batcher was closed")
    with pytest.raises(BatcherError, match="the batcher is closed; make another"):
        batcher.submit([1])
    assert model(input_ids=torch.tensor([[1]])).logits.shape == (1, 1, tiny_models.VOCABULARY)


def test_whether_it_is_synchronous_is_changed_between_runs_only():
    expected = tokens()
    with make() as batcher:
        assert not batcher.synchronous
        found = []
        for synchronous in (True, False):
            batcher.synchronous = synchronous
            requests = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
            with pytest.raises(BatcherError, match="synchronous can't be changed while requests run"):
                batcher.synchronous = False
            batcher.run()
            found.append([request.result() for request in requests])
        assert found[0] == found[1] == expected


def test_one_thread_steps_at_a_time():
    with make() as batcher:
        batcher.submit([1, 2], max_new_tokens=4)
        with batcher._stepping, pytest.raises(BatcherError, match="runs in another thread"):
            batcher.step()


def test_a_result_is_not_there_before_the_end():
    with make() as batcher:
        request = batcher.submit([1, 2], max_new_tokens=4)
        with pytest.raises(RequestError, match="not finished; run the batcher, or iterate over the request"):
            request.result()
