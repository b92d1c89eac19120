"""Asynchronous stopping against the synchronous loop of transformers, on a device whose flags are late."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import EVERYTHING, RowsStopAt, assert_same, late, may_wait, seeded, ways_to_stop
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateChannel
from switched_on import enabled, nothing_said

from vllm_async_spec import generation
from vllm_async_spec.generation import async_generate
from vllm_async_spec.generation.rollback import crop_cache
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList

__all__ = ["enabled", "nothing_said"]  # fixtures


def stopping_at(lengths: list[int]) -> Callable[[], Any]:
    return lambda: transformers.StoppingCriteriaList([RowsStopAt(lengths)])


def both(kind: str, channel: LateChannel, inputs: dict[str, Any], *, options: Any = None, **kwargs: Any):
    model = tiny_models.model(kind)
    return [seeded(model, inputs, way, **kwargs) for way in ({}, late(channel, **(options or {})))]


KINDS = ["llama", "gpt2", "sliding", "hybrid"]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(KINDS))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    cap = draw(st.integers(1, 12))
    kwargs: dict[str, Any] = {"max_new_tokens": cap, "do_sample": draw(st.booleans())}
    kwargs |= EVERYTHING if draw(st.booleans()) else {}
    kwargs |= {"cache_implementation": "static"} if draw(st.booleans()) else {}
    kwargs |= draw(ways_to_stop(lengths))
    return {
        "kind": kind,
        "inputs": tiny_models.prompts(lengths, draw(st.sampled_from(["left", "right"])), draw(st.integers(0, 99))),
        "channel": LateChannel(draw(st.integers(0, 4)), seed=draw(st.none() | st.integers(0, 99))),
        "options": {"poll_every": draw(st.integers(1, 3)), "max_in_flight": draw(st.integers(1, 3))},
        "kwargs": kwargs,
    }


@settings(max_examples=80)
@given(cases())
def test_it_is_the_synchronous_loop_however_late_the_flags_are(case: dict[str, Any]):
    (expected, state), (output, state_after) = both(
        case["kind"], case["channel"], case["inputs"], options=case["options"], **case["kwargs"]
    )
    assert_same(expected, output)
    assert torch.equal(state, state_after)
    assert case["channel"].sent > 0


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_overshoot_runs_and_leaves_no_trace(kind: str, batch: int, cache: str):
    inputs = tiny_models.prompts([1 + row % 4 for row in range(batch)])
    longest = inputs["input_ids"].shape[1]
    criteria = stopping_at([longest + 1 + row % 5 for row in range(batch)])
    channel = LateChannel(2)
    (expected, _), (output, _) = both(
        kind, channel, inputs, options={"max_in_flight": 3}, stopping_criteria=criteria, max_new_tokens=15,
        cache_implementation=cache, **EVERYTHING,
    )  # fmt: skip
    assert_same(expected, output)
    assert channel.sent == min(batch, 5) + 2, "the loop that was measured ran no overshoot"
    assert channel.waits == 0


def test_rows_that_stopped_get_pads_and_a_later_call_draws_the_same_numbers():
    inputs = tiny_models.prompts([3] * 8)
    channel = LateChannel(3)
    (expected, state), (output, state_after) = both(
        "llama",
        channel,
        inputs,
        options={"max_in_flight": 4},
        do_sample=True,
        eos_token_id=[2, 3, 5],
        max_new_tokens=40,
    )
    assert torch.equal(expected, output)
    assert torch.equal(state, state_after)
    assert (output[:, -1] == 0).sum() >= 4, "too few rows stop early"
    assert channel.sent == output.shape[1] - 3 + 3


@may_wait
@pytest.mark.parametrize("way", [{}, {"interleaved": True, "static_cache": False}], ids=["stopping", "interleaved"])
@pytest.mark.parametrize("what", ["submodule", "processor", "hook"])
def test_draws_of_overshoot_are_undone_in_greedy_search(what: str, way: dict[str, Any]):
    model = copy.deepcopy(tiny_models.model("llama"))
    given = {"max_new_tokens": 15, "stopping_criteria": stopping_at([6]), **tiny_models.prompts([3])}
    if what == "submodule":
        model.model.layers[0].self_attn.train().attention_dropout = 0.5
    elif what == "hook":
        model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out + torch.rand_like(out))
        # transformers' own criterion, which draws nothing
        given |= {"stopping_criteria": [], "eos_token_id": list(range(2, tiny_models.VOCABULARY))}
    else:
        given["logits_processor"] = [lambda ids, scores: scores + torch.rand_like(scores)]
    channel = LateChannel(2)
    found = [seeded(model, {}, each, **given) for each in ({}, late(channel, max_in_flight=3, **way))]
    assert channel.sent > found[0][0].shape[1] - 3, "it ran no overshoot"
    assert all(map(torch.equal, *found))


def test_encoder_and_decoder():
    inputs = tiny_models.prompts([4, 2, 3], "right")
    criteria = stopping_at([3, 5, 4])
    channel = LateChannel(1)
    (expected, _), (output, _) = both(
        "encoder-decoder", channel, inputs, stopping_criteria=criteria, max_new_tokens=9, **EVERYTHING
    )
    assert_same(expected, output)
    assert channel.sent == 5


@pytest.mark.parametrize(("poll_every", "max_in_flight"), list(itertools.product([1, 2, 5], [1, 2, 3])))
def test_nobody_runs_further_ahead_than_was_said(poll_every: int, max_in_flight: int):
    furthest = poll_every * (max_in_flight + 1) - 1
    overshoots = set()
    for stop in range(4, 4 + poll_every):
        channel = LateChannel(10**6)
        criteria = AsyncStoppingCriteriaList(
            [RowsStopAt([stop])], poll_every=poll_every, max_in_flight=max_in_flight, open_channel=channel.open,
            starts_unfinished=True,
        )  # fmt: skip
        length = 3
        unfinished = torch.ones(1, dtype=torch.long)
        while bool(unfinished.max() != 0):
            length += 1
            unfinished = unfinished & ~criteria(torch.ones(1, length, dtype=torch.long), None)
        assert criteria.stopped
        assert channel.waits > 0
        overshoots.add(criteria.finish())
    assert max(overshoots) == furthest


@pytest.mark.parametrize("limit", [{"max_length": 9}, {"max_length": 60, "max_time": 5.5}], ids=["length", "time"])
def test_what_the_host_knows_is_never_overshot(limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(time=itertools.count().__next__)
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
    inputs = tiny_models.prompts([3])
    lengths = []

    class Lengths(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            lengths.append(input_ids.shape[1])
            return scores

    processors = transformers.LogitsProcessorList([Lengths()])
    channel = LateChannel(10)
    model = tiny_models.model("llama")
    model.generate(
        **inputs, **limit, logits_processor=processors, custom_generate=generation.generate,
        open_channel=channel.open, max_in_flight=20, cache_implementation="static",
    )  # fmt: skip
    assert max(lengths) == 8


def test_a_finish_that_is_learnt_of_only_at_max_length_still_counts():
    inputs = tiny_models.prompts([3])
    criteria = stopping_at([5])
    channel = LateChannel(10**6)
    (expected, _), (output, _) = both(
        "llama", channel, inputs, options={"max_in_flight": 30, "poll_every": 4}, max_length=13,
        stopping_criteria=criteria, **EVERYTHING,
    )  # fmt: skip
    assert output.sequences.shape == (1, 5)
    assert_same(expected, output)


def test_a_cache_of_the_caller_can_be_continued():
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([4])["input_ids"]
    found = []
    for way in ({}, late(LateChannel(1))):
        cache = transformers.DynamicCache()
        stop = transformers.StoppingCriteriaList([RowsStopAt([7])])
        first = model.generate(inputs, past_key_values=cache, max_new_tokens=20, stopping_criteria=stop, **way)
        assert cache.get_seq_length() == 6
        found.append(model.generate(first, past_key_values=cache, max_new_tokens=5))
    assert torch.equal(*found)


def test_a_cache_by_another_name_is_left_as_the_synchronous_loop_leaves_it(
    nothing_said: None, monkeypatch: pytest.MonkeyPatch
):
    """As if a later transformers called the argument something else."""
    monkeypatch.setattr(async_generate, "CACHE", "another name")
    with pytest.warns(generation.SynchronousGenerationWarning, match="unknown whether that cache can be cropped"):
        test_a_cache_of_the_caller_can_be_continued()


# Refusals and fallbacks


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_window_that_passes_is_not_cropped_but_generation_waits(nothing_said: None, kind: str, cache: str):
    inputs = tiny_models.prompts([3])
    criteria = stopping_at([28])
    channel = LateChannel(1)
    with pytest.warns(
        generation.SynchronousGenerationWarning, match="SlidingWindowLayer keeps only .* of up to 32 tokens"
    ):
        (expected, _), (output, _) = both(
            kind, channel, inputs, max_new_tokens=30, stopping_criteria=criteria,
            cache_implementation=cache, **EVERYTHING,
        )  # fmt: skip
    assert channel.sent == 0
    assert_same(expected, output)


@may_wait
@pytest.mark.parametrize("max_new_tokens", [20, 21, 22, 23])
@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_edge_of_a_window(kind: str, cache: str, max_new_tokens: int):
    inputs = tiny_models.prompts([3])
    criteria = stopping_at([3 + max_new_tokens - 1])
    (expected, _), (output, _) = both(
        kind, LateChannel(1), inputs, max_new_tokens=max_new_tokens, stopping_criteria=criteria,
        cache_implementation=cache, **EVERYTHING,
    )  # fmt: skip
    assert_same(expected, output)


CACHES = [transformers.DynamicCache, partial(transformers.StaticCache, max_cache_len=40)]


@pytest.mark.parametrize("make", CACHES)
def test_a_cache_that_the_model_never_filled_stays_empty(make: Any):
    cache = make(config=tiny_models.model("llama").config)
    crop_cache(cache, 2)
    assert cache.get_seq_length() == 0


@may_wait
@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="this transformers needs all tokens")
@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize(("held", "sent"), [(3, 5), (20, 0)])
def test_a_continued_cache_is_counted(make: Any, held: int, sent: int):
    model, ids = tiny_models.model("sliding"), tiny_models.prompts([held, 3])["input_ids"]
    found, channel = [], LateChannel(2)
    for way in ({}, late(channel, max_in_flight=3)):
        cache = make(config=model.config)
        model.generate(ids[:1], past_key_values=cache, max_new_tokens=1)
        given = {"attention_mask": torch.ones(1, held + 3), "stopping_criteria": stopping_at([6])()}
        found.append(model.generate(ids[1:, -3:], past_key_values=cache, max_new_tokens=8, **given, **way))
        assert cache.get_seq_length() == held + 5
    assert torch.equal(*found)
    assert channel.sent == sent


@pytest.mark.filterwarnings("ignore:.*a StaticLayer has room")
def test_extra_steps_do_not_overrun_a_small_static_cache():
    """Stock stops before the cache is full, and steps beyond would write behind its end."""
    model, ids = tiny_models.model("llama"), tiny_models.prompts([3])["input_ids"]
    found, channel = [], LateChannel(2)
    for way in ({}, late(channel, max_in_flight=3)):
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        stop = {"max_new_tokens": 20, "stopping_criteria": stopping_at([8])()}
        found.append(model.generate(ids, past_key_values=cache, **stop, **way))
    assert torch.equal(*found)
    assert channel.sent == 0


# The configuration's extra


class Tokens:
    def __init__(self):
        self.seen: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_the_extra_of_the_configuration(enabled: LateChannel):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3, 2])
    settings = {"max_new_tokens": 20, "pad_token_id": 0, "stop_strings": ["c", "d", "e", "f", "g", "h"]}
    tokenizer = tiny_models.tokenizer()
    outputs = []
    for extra in ({}, {"async_stopping_criteria": True, "async_stopping_max_in_flight": 3}):
        config = transformers.GenerationConfig(**settings, do_sample=True, **extra)
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs, generation_config=config, tokenizer=tokenizer))
    assert torch.equal(*outputs)
    assert enabled.sent == outputs[0].shape[1] - 3 + 2


def test_a_streamer_gets_each_token_once(enabled: LateChannel):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3])
    config = transformers.GenerationConfig(max_new_tokens=6, pad_token_id=0, async_stopping_criteria=True)
    streamer = Tokens()
    with pytest.warns(generation.SynchronousGenerationWarning, match="a streamer reads each token"):
        output = model.generate(**inputs, generation_config=config, streamer=streamer)
    assert streamer.ended
    assert streamer.seen == output[0].tolist()
    assert enabled.sent == 0


@pytest.mark.parametrize("kwargs", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_the_strict_extra_refuses_other_modes(enabled: LateChannel, kwargs: dict[str, Any]):
    model = tiny_models.model("llama")
    extra = {"async_stopping_criteria": True, "async_stopping_strict": True}
    config = transformers.GenerationConfig(max_new_tokens=6, pad_token_id=0, **extra, **kwargs)
    with pytest.raises(ValueError, match=r"not (beam_search|assisted_generation)"):
        model.generate(**tiny_models.prompts([3]), generation_config=config)


def test_disable_puts_everything_back():
    before = {name: getattr(transformers.GenerationMixin, name) for name in ("_sample", "_beam_search")}
    generation.enable()
    generation.enable()
    assert transformers.GenerationMixin._sample is not before["_sample"]
    generation.disable()
    assert {name: getattr(transformers.GenerationMixin, name) for name in before} == before
