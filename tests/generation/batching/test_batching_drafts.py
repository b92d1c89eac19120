"""Continuous batching with a draft model: the tokens of the batcher without one, and how many a step gives."""

import copy
import functools
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import batcher_of
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateStreams
from small_batchers import EOS, LENGTH, PROMPTS, RUNS, WAYS, failing, generated, make, prompts, submit_all, tokens

from vllm_async_spec import sync_policy
from vllm_async_spec.generation.batching import AttentionChoiceError, ModelError, RequestError

NOISE = {"the same": 0.0, "noisy": 0.15, "other": 5.0}
"""What a drafter's weights differ from the target's by, in standard deviations of each weight."""


@functools.cache
def drafter(kind: str, similarity: str) -> Any:
    made = copy.deepcopy(tiny_models.model(kind))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in made.parameters():
            weights += NOISE[similarity] * torch.randn(weights.shape, generator=generator) * weights.std()
    return made


@functools.cache
def expected(kind: str) -> list[list[int]]:
    return [generated(kind, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "way", ["synchronous", "asynchronous", "late, two steps ahead", "late now and then", "small cache"]
)
@pytest.mark.parametrize("similarity", NOISE)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_tokens_are_those_of_generate(kind: str, similarity: str, way: str):
    assert tokens(kind, draft_model=drafter(kind, similarity), draft_tokens=3, **WAYS[way]) == expected(kind)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_good_drafter_s_drafts_are_accepted_and_a_bad_one_s_are_not(kind: str):
    found = {}
    for similarity in NOISE:
        with make(kind, draft_model=drafter(kind, similarity), draft_tokens=3) as batcher:
            assert batcher.accepted == 1.0
            submit_all(batcher)
            batcher.run()
            found[similarity] = batcher.accepted
    assert found["the same"] > 3.5
    assert 1.2 < found["noisy"] < 3.5
    assert 1.0 <= found["other"] < 1.2


@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_of_a_copy_every_draft_is_accepted(kind: str, drafts: int):
    new_tokens = 1 + 4 * (1 + drafts)
    with make(kind, draft_model=drafter(kind, "the same"), draft_tokens=drafts, eos_token_id=[]) as batcher:
        found = [batcher.submit(prompt, max_new_tokens=new_tokens) for prompt in PROMPTS if len(prompt) < 30]
        batcher.run()
        assert batcher.accepted == 1 + drafts
    assert all(len(request.result()) == new_tokens for request in found)


def test_compiled_decodes_give_the_same_tokens():
    drafted = {"draft_model": drafter("llama", "noisy"), "draft_tokens": 3}
    expected = tokens("llama", **drafted)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert tokens("llama", torch_compile="aot_eager", decode_sizes=[3], **drafted) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@settings(max_examples=25, deadline=None)
@given(**RUNS, drafts=st.integers(1, 5), similarity=st.sampled_from(sorted(NOISE)))
def test_the_tokens_are_those_without_drafts(
    lengths: list[int],
    new_tokens: int,
    drafts: int,
    similarity: str,
    ahead: int,
    batch: int,
    page_size: int,
    seed: int,
):
    found = []
    drafted = {"draft_model": drafter("llama", similarity), "draft_tokens": drafts}
    for way in ({"synchronous": True}, drafted | {"steps_ahead": ahead, "open_streams": LateStreams(seed).open}):
        with make(max_batch=batch, page_size=page_size, **way) as batcher:
            free = batcher.free_pages
            requests = [batcher.submit(each, max_new_tokens=new_tokens) for each in prompts(lengths, seed)]
            batcher.run()
            assert batcher.free_pages == free
            found.append([(request.result(), request.finish_reason) for request in requests])
    assert found[0] == found[1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_end_amid_accepted_tokens_is_the_end(kind: str, late: bool):
    options: dict[str, Any] = {"draft_model": drafter(kind, "the same"), "draft_tokens": 3}
    options |= {"open_streams": LateStreams().open, "steps_ahead": 2} if late else {}
    whole = {tuple(prompt): generated(kind, prompt, 20, ()) for prompt in PROMPTS[:4]}
    places = set()
    for prompt, made in whole.items():
        for token in set(made):
            index = made.index(token)
            places.add((index - 1) % 4 if index else "prompt")
            with make(kind, eos_token_id=token, **options) as batcher:
                free = batcher.free_pages
                request, short = (batcher.submit(prompt, max_new_tokens=count) for count in (20, max(index, 1)))
                also = batcher.submit(prompt, max_new_tokens=index + 1)
                batcher.run()
                assert batcher.free_pages == free
            assert (request.result(), request.finish_reason) == (made[: index + 1], "eos")
            assert (also.result(), also.finish_reason) == (made[: index + 1], "eos")
            assert (short.result(), short.finish_reason) == (made[: max(index, 1)], "length" if index else "eos")
    assert places == {0, 1, 2, 3, "prompt"}
    with make(kind, eos_token_id=[], **options) as batcher:
        for count in range(1, 11):
            request = batcher.submit(PROMPTS[3], max_new_tokens=count)
            batcher.run()
            assert (request.result(), request.finish_reason) == (whole[tuple(PROMPTS[3])][:count], "length")


@pytest.mark.parametrize("steps_ahead", [1, 3])
@pytest.mark.parametrize("similarity", ["the same", "noisy"])
def test_a_sequence_may_be_as_long_as_the_models_are(similarity: str, steps_ahead: int):
    """GPT-2 looks positions up in a table; one behind its end would be an error."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=24, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.add_(NOISE[similarity] * torch.randn(other.lm_head.weight.shape))
    found = {}
    for name, drafted in {"plain": {}, "drafted": {"draft_model": other, "draft_tokens": 5}}.items():
        with batcher_of(model, max_batch=2, page_size=4, steps_ahead=steps_ahead, **drafted) as batcher:
            requests = [batcher.submit(each, max_new_tokens=24 - len(each)) for each in prompts([5, 1, 23, 12])]
            batcher.run()
            found[name] = [request.result() for request in requests]
            with pytest.raises(RequestError, match="together more than max_length, 24; shorten"):
                batcher.submit([1] * 5, max_new_tokens=20)
    assert found["drafted"] == found["plain"]
    assert [len(each) for each in found["plain"]] == [19, 23, 1, 12]


@pytest.mark.parametrize("drafts", [0, 3])
def test_nothing_waits_but_for_the_step_before(drafts: int):
    streams = LateStreams()
    drafted = {"draft_model": drafter("llama", "noisy"), "draft_tokens": drafts} if drafts else {}
    with make(open_streams=streams.open, **drafted) as batcher, sync_policy("error"):
        batcher.submit([1, 2, 3], max_new_tokens=12)
        steps = 0
        while batcher.busy:
            batcher.step()
            steps += 1
    assert 0 < streams.waits <= steps


@pytest.mark.parametrize("calls", [{1}, {2, 3}, {6}, {8, 10}, {9, 13}])
@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_a_step_without_memory_fails_one_request_and_the_others_go_on(whose: str, calls: set[int]):
    drafting = drafter("llama", "noisy")
    failed_model = drafting if whose == "drafter" else tiny_models.model("llama")
    with make(max_batch=4, draft_model=drafting, draft_tokens=3) as batcher:
        free = batcher.free_pages
        found = submit_all(batcher)
        with failing(failed_model, calls, torch.OutOfMemoryError("tried to allocate")):
            batcher.run()
        assert batcher.free_pages == free
    assert sum(request.error is not None for request in found) == len(calls)
    for request, whole in zip(found, expected("llama"), strict=True):
        assert request.tokens == (whole if request.error is None else whole[: len(request.tokens)])


def test_a_sampled_request_is_refused():
    with (
        make(draft_model=drafter("llama", "noisy")) as batcher,
        pytest.raises(
            RequestError, match=r"temperature is 0\.7, and a batcher with a draft model decodes greedily; leave"
        ),
    ):
        batcher.submit([1], temperature=0.7)


def test_a_bad_draft_model_is_refused_and_the_model_is_free_again():
    model, copied = tiny_models.model("llama"), drafter("llama", "the same")
    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(model.config.to_dict() | {"vocab_size": 20})))
    short = transformers.LlamaConfig(**(model.config.to_dict() | {"max_position_embeddings": 32}))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"draft_model": model}, "the draft model is the model itself, which would gain nothing; give a smaller model"),
        (
            {"draft_model": wide.eval()},
            "the draft model's vocabulary has 20 tokens and the model's has 13; give a draft",
        ),
        ({"draft_model": tiny_models.model("softcap")}, "attends with softcap, which no adapter supports"),
        ({"draft_tokens": 2}, "draft_tokens is 2 and there is no draft_model; give a draft_model, or leave"),
        ({"draft_model": copied, "draft_tokens": 0}, "draft_tokens is 0; it must be at least 1"),
        (
            {"draft_model": transformers.LlamaForCausalLM(short).eval()},
            f"max_length is {LENGTH} and the draft model has 32 positions; give at most 32",
        ),
    ]
    for options, message in refused:
        with pytest.raises((ValueError, ModelError, AttentionChoiceError), match=message):
            make(**options)
        assert model.config._attn_implementation == "eager"
    assert tiny_models.model("softcap").config._attn_implementation == "eager"


def test_the_draft_model_belongs_to_the_batcher_until_that_is_closed():
    copied = drafter("llama", "the same")
    with make(draft_model=copied):
        with pytest.raises(ModelError, match="belongs to a ContinuousBatcher; close that batcher first"):
            make("gpt2", draft_model=copied)
        assert tiny_models.model("gpt2").config._attn_implementation == "eager"
    assert copied.config._attn_implementation == tiny_models.model("llama").config._attn_implementation == "eager"
    with make(draft_model=copied, eos_token_id=EOS) as batcher:
        assert batcher.submit([1, 2], max_new_tokens=3).prompt == (1, 2)
