"""The tokens of continuous batching: those of `generate` of transformers, and its own on a device that is late."""

import itertools
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateStreams
from small_batchers import PROMPTS, RUNS, WAYS, generated, make, prompts, submit_all, tokens

from vllm_async_spec.generation.batching.request import RequestError
from vllm_async_spec.generation.batching.sampling import gumbel_noise, sample


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding"])
def test_the_tokens_are_those_of_generate(kind: str, way: str):
    expected = [generated(kind, prompt, 20) for prompt in PROMPTS]
    assert len({len(each) for each in expected}) > 2, "some end early, and some don't"
    assert tokens(kind, **WAYS[way]) == expected


@pytest.mark.parametrize("kind", ["masked", "unused window", "strided"])
def test_the_tokens_of_other_models_are_those_of_generate(kind: str):
    if not tiny_models.model(kind)._can_set_attn_implementation():
        pytest.skip("no AttentionInterface in this transformers")
    expected = [generated(kind, prompt, 20) for prompt in PROMPTS]
    assert tokens(kind) == expected


@settings(max_examples=25)
@given(**RUNS, temperature=st.sampled_from([0.0, 0.7]))
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


def test_a_row_computed_too_late_to_matter_is_dropped(monkeypatch: pytest.MonkeyPatch):
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
            found = submit_all(batcher)
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


def answers(*seeds: int | None, generator: int = 0) -> list[list[int]]:
    torch.manual_seed(generator)
    with make() as batcher:
        found = [batcher.submit(PROMPTS[0], max_new_tokens=24, temperature=1.0, seed=seed) for seed in seeds]
        batcher.run()
    return [request.result() for request in found]


def test_requests_without_a_seed_draw_fresh_and_those_with_one_repeat():
    first, second, *seeded = answers(None, None, 7, 7)
    assert first != second
    assert seeded[0] == seeded[1] == answers(7, generator=1)[0]


def test_the_default_generator_repeats_a_run_without_seeds():
    expected = answers(None, None)
    assert answers(None, None) == expected
    assert answers(None, None, generator=1) != expected


def test_the_seed_that_was_drawn_is_told_and_greedy_or_refused_requests_draw_none():
    with make() as batcher:
        state = torch.get_rng_state()
        batcher.submit(PROMPTS[0], max_new_tokens=24)
        with pytest.raises(RequestError, match="the prompt has token 99"):
            batcher.submit([99], max_new_tokens=24, temperature=1.0)
        assert torch.equal(torch.get_rng_state(), state)
        drawn = batcher.submit(PROMPTS[0], max_new_tokens=24, temperature=1.0)
        batcher.run()
    assert answers(drawn.seed) == [drawn.result()]


def test_a_greedy_request_is_greedy_beside_sampled_ones():
    expected = tokens()
    with make(max_batch=8) as batcher:
        found = [
            batcher.submit(prompt, max_new_tokens=20, temperature=2.0 * (index % 2), seed=0)
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
    """A correlation of 0.03 would be four standard deviations."""
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
