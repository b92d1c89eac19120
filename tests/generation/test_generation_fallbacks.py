"""What neither asynchronous stopping nor interleaving can do."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import RowsStopAt, late, seeded
from late_device import LateChannel
from packaging.version import Version
from switched_on import enabled, nothing_said

from vllm_async_spec import generation
from vllm_async_spec.generation import SynchronousGenerationWarning
from vllm_async_spec.generation.cache_argument import CACHE
from vllm_async_spec.generation.dropped_arguments import dropped_arguments

__all__ = ["enabled", "nothing_said"]  # fixtures

OLD = transformers.__version__.startswith("4.")
RUNS_BLOOM = OLD or Version(transformers.__version__) >= Version("5.21")
INTERLEAVED = {"interleaved": True}
FALLBACKS = [
    ("llama", {"num_beams": 3}, {}, "not beam_search"),
    ("llama", {"num_beams": 3, "do_sample": True}, {}, "not beam_sample"),
    ("llama", {"num_beams": 3}, INTERLEAVED, "not beam_search"),
    ("encoder-decoder", {"num_beams": 3}, {}, "not beam_search"),
    ("encoder-decoder", {}, INTERLEAVED, "only decoder-only models, and T5ForConditionalGeneration has an encoder"),
    ("mamba", {"do_sample": True}, INTERLEAVED, "a cache of keys and values, and transformers makes none for Mamba"),
    ("mamba", {}, {"interleaved": False, "static_cache": False}, "transformers makes none for MambaForCausalLM"),
    (
        "half mamba",
        {},
        INTERLEAVED,
        "makes none for JambaForCausalLM" if OLD else "the static cache of JambaForCausalLM has a LinearAttentionLayer",
    ),
    ("own cache", {}, INTERLEAVED, "GPTNeoForCausalLM does not support a static cache"),
    ("llama", {}, {}, "need a CUDA device, and input_ids are on cpu"),
    ("llama", {}, INTERLEAVED, "need a CUDA device, and input_ids are on cpu"),
]


def generate(kind: str = "llama", **kwargs: Any) -> torch.Tensor:
    given = {"max_new_tokens": 6, "custom_generate": generation.generate, **kwargs}
    return tiny_models.model(kind).generate(**tiny_models.prompts([4, 4]), **given)


@contextlib.contextmanager
def one_warning(sentence: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(each.message) for each in caught if each.category is SynchronousGenerationWarning]
    assert len(found) == 1, found
    assert sentence in found[0]


@pytest.mark.parametrize(("kind", "kwargs", "way", "sentence"), FALLBACKS)
def test_it_is_transformers_own_loop_with_one_warning(
    nothing_said: None, kind: str, kwargs: dict[str, Any], way: dict[str, Any], sentence: str
):
    model = tiny_models.model(kind)
    inputs = tiny_models.prompts([4, 4])
    expected, _ = seeded(model, inputs, {}, max_new_tokens=6, **kwargs)
    with one_warning(sentence):
        for _ in range(2):
            found, _ = seeded(
                model, inputs, {"custom_generate": generation.generate, **way}, max_new_tokens=6, **kwargs
            )
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "kwargs", "way", "sentence"), FALLBACKS)
def test_strict_refuses_it(kind: str, kwargs: dict[str, Any], way: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"{sentence}.*; leave out strict to generate synchronously instead"):
        generate(kind, strict=True, **way, **kwargs)


@pytest.mark.parametrize("way", [{"num_beams": 3}, INTERLEAVED, INTERLEAVED | {"num_beams": 3}])
@pytest.mark.parametrize("kind", ["llama", "encoder-decoder"])
def test_a_bad_option_is_refused_before_any_loop_runs(kind: str, way: dict[str, Any]):
    with pytest.raises(ValueError, match="poll_every is 0; it must be at least 1"):
        generate(kind, poll_every=0, **way)


def test_a_mamba_state_that_outlives_the_call_is_not_cropped_but_generation_waits(nothing_said: None):
    inputs = tiny_models.prompts([4, 4])
    channel = LateChannel(2)
    with one_warning(
        "the cache has a LinearAttentionLayer, which can't be cropped"
        if CACHE == "cache"
        else "the model makes its own cache, so it is unknown whether that cache can be cropped"
    ):
        (expected, _), (found, _) = (
            seeded(tiny_models.model("mamba"), inputs, way, max_new_tokens=8, return_dict_in_generate=True)
            for way in ({}, late(channel))
        )
    assert torch.equal(found.sequences, expected.sequences)
    assert channel.sent == 0


class Counting(transformers.DynamicCache):
    """A cache that counts its tokens itself, which no crop undoes."""

    seen = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen += keys.shape[-2] * (layer_idx == 0)
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen


def test_a_cache_with_a_state_of_its_own_is_not_cropped_but_generation_waits(nothing_said: None):
    given = {"max_new_tokens": 30, "eos_token_id": [2, 3, 4, 5]}
    channel = LateChannel(2)
    seen = []
    with one_warning("the cache is a Counting, which can't be cropped"):
        for way in ({}, late(channel)):
            cache = Counting(config=tiny_models.model("llama").config)
            output, _ = seeded(
                tiny_models.model("llama"), tiny_models.prompts([4]), way, past_key_values=cache, **given
            )
            seen.append((output.tolist(), cache.seen))
    assert seen[0] == seen[1]
    assert len(seen[0][0][0]) < 34, "no sequence ends early, so that no step could be extra"
    assert channel.sent == 0


@pytest.mark.parametrize(
    "way",
    [{}, INTERLEAVED | {"static_cache": False}, INTERLEAVED | {"cuda_graphs": False}],
    ids=["stopping", "growing", "static"],
)
@pytest.mark.parametrize(("kind", "waits"), [("dynamic rotary", True), ("long rotary", False)])
def test_extra_steps_leave_no_frequencies_to_later_calls(
    nothing_said: None, kind: str, waits: bool, way: dict[str, Any]
):
    channel = LateChannel(1)
    given = {"stopping_criteria": [RowsStopAt([12])], "max_new_tokens": 20}
    logits = []
    with warnings.catch_warnings(record=True) as caught:
        for each in ({}, late(channel, **way)):
            model = copy.deepcopy(tiny_models.model(kind))
            output, _ = seeded(model, tiny_models.prompts([5]), each, **given)
            assert output.shape[1] == 12
            logits.append(model(tiny_models.prompts([10], seed=4)["input_ids"]).logits)
    assert torch.equal(*logits)
    assert (channel.sent == 0) == waits
    reason = "the LlamaRotaryEmbedding is of type dynamic, and an extra step would change its frequencies"
    assert any(reason in str(each.message) for each in caught) == waits


# enable()


@pytest.mark.parametrize(
    ("kwargs", "name"), [({"num_beams": 3}, "beam_search"), ({"prompt_lookup_num_tokens": 2}, "assisted_generation")]
)
def test_other_modes_fall_back_for_every_model(enabled: LateChannel, kwargs: dict[str, Any], name: str):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([4])
    expected = model.generate(**inputs, max_new_tokens=6, **kwargs)
    with one_warning(
        f"transformers' own loop generates: asynchronous stopping supports greedy search and sampling, not {name}"
    ):
        found = model.generate(**inputs, max_new_tokens=6, async_stopping_criteria=True, **kwargs)
    assert torch.equal(found, expected)
    assert enabled.sent == 0


class OwnLoop(transformers.LlamaForCausalLM):
    """A class that decodes in a way of its own: no model is asked, and the last token of each prompt is repeated."""

    def _sample(self, input_ids: torch.Tensor, *, stopping_criteria: Any, **kwargs: Any) -> torch.Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        while not bool(done.all()):
            input_ids = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
            done |= stopping_criteria(input_ids, None)
            assert input_ids.shape[1] < 20, "it was not stopped"
        return input_ids


@pytest.mark.parametrize("way", [{}, INTERLEAVED, {"interleaved": False, "static_cache": False}])
def test_a_loop_of_the_class_is_not_replaced(nothing_said: None, way: dict[str, Any]):
    model = OwnLoop(tiny_models.model("llama").config)
    given = {**tiny_models.prompts([4, 4]), "max_new_tokens": 6}
    channel = LateChannel(0)
    with one_warning("stopping criteria are evaluated synchronously: OwnLoop has a decode loop of its own"):
        found = model.generate(**given, **late(channel, **way))
    assert torch.equal(found, model.generate(**given))
    assert channel.sent == 0
    with pytest.raises(ValueError, match="OwnLoop has a decode loop of its own; leave out strict"):
        model.generate(**given, **late(channel, strict=True, **way))


def test_a_model_with_a_loop_of_its_own_is_named(enabled: LateChannel):
    model = OwnLoop(tiny_models.model("llama").config)
    inputs = tiny_models.prompts([4])
    with one_warning("OwnLoop has a decode loop of its own"):
        model.generate(**inputs, max_new_tokens=6, async_stopping_criteria=True)
    with pytest.raises(ValueError, match="OwnLoop has a decode loop of its own; leave out strict"):
        model.generate(**inputs, max_new_tokens=6, async_stopping_criteria=True, async_stopping_strict=True)


def test_the_keywords_do_what_the_configuration_does(enabled: LateChannel):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3, 2])
    settings = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": [2, 3, 4, 5], "do_sample": True}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings)
    extra = {"async_stopping_criteria": True, "async_stopping_max_in_flight": 3}
    steps = expected.shape[1] - 3
    torch.manual_seed(3)
    assert torch.equal(model.generate(**inputs, **settings, **extra), expected)
    assert enabled.sent == steps + 2
    torch.manual_seed(3)
    config = transformers.GenerationConfig(**settings)
    assert torch.equal(model.generate(**inputs, generation_config=config, **extra), expected)
    assert enabled.sent == 2 * (steps + 2)
    assert not hasattr(config, "async_stopping_criteria"), "the caller's configuration was changed"


def test_false_is_transformers_own_loop(enabled: LateChannel):
    generate(custom_generate=None, async_stopping_criteria=False)
    assert enabled.sent == 0


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"async_stopping_criteria": "yes"}, "async_stopping_criteria is 'yes'; it must be True or False"),
        (
            {"async_stopping_poll_every": 2},
            "async_stopping_poll_every is 2, and async_stopping_criteria is not set; pass async_stopping_criteria=True",
        ),
        ({"async_stopping_criteria": True, "async_stopping_poll_every": 0}, "poll_every is 0; it must be at least 1"),
        ({"async_stopping_criteria": True, "async_stopping_poll_every": None}, "poll_every is None; it must be int"),
        ({"async_stopping_criteria": True, "async_stopping_strict": 1}, "async_stopping_strict is 1; it must be True"),
    ],
)
def test_bad_keywords_are_refused(enabled: LateChannel, kwargs: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        generate(custom_generate=None, **kwargs)


def test_without_enable_the_keyword_is_unknown_to_transformers():
    with pytest.raises(ValueError, match=r"not used by the model: \['async_stopping_criteria'\]"):
        generate(custom_generate=None, async_stopping_criteria=True)


# What transformers drops, and errors of models


def test_a_streamer_is_found_behind_a_function_of_the_caller():
    def mine(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return generation.generate(model, input_ids, **kwargs)

    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3])
    streamer = transformers.TextStreamer(tiny_models.tokenizer())
    empty = type("Empty", (transformers.TextStreamer,), {"__len__": lambda self: 0})(tiny_models.tokenizer())
    for each in (streamer, empty):
        with pytest.raises(ValueError, match="transformers passes no streamer to a custom_generate function"):
            model.generate(**inputs, max_new_tokens=3, custom_generate=mine, streamer=each)
    with pytest.raises(ValueError, match="not assisted_generation; leave out custom_generate"):
        model.generate(**inputs, max_new_tokens=3, custom_generate=mine, assistant_model=model)


@pytest.mark.parametrize("spread_by", ["is_deepspeed_zero3_enabled", "is_fsdp_managed_module"])
@pytest.mark.parametrize("way", [{}, INTERLEAVED])
def test_ranks_that_transformers_synchronises_by_itself_are_not_left_behind(
    monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], spread_by: str
):
    utils = transformers.generation.utils
    ranks = (utils, "_get_torch_distributed_world_size") if not OLD else (torch.distributed, "get_world_size")
    monkeypatch.setattr(utils, spread_by, lambda *_: True)
    monkeypatch.setattr(*ranks, lambda: 2)
    for given in ({}, {"synced_gpus": True}):
        with pytest.raises(ValueError, match="transformers passes no synced_gpus to a custom_generate function; leave"):
            generate(**late(LateChannel(0)), **way, **given)
    expected = generate(custom_generate=None, synced_gpus=False)
    assert torch.equal(generate(**late(LateChannel(0)), synced_gpus=False), expected)
    monkeypatch.setattr(*ranks, lambda: 1)
    assert torch.equal(generate(**late(LateChannel(0))), expected)


def test_the_arguments_of_another_models_generation_are_not_ours():
    model, other = tiny_models.model("llama"), tiny_models.model("gpt2")
    streamer = transformers.TextStreamer(tiny_models.tokenizer())
    found = []

    class Looks(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            found.extend(dropped_arguments(each).lost for each in (model, other))
            return scores

    looks = transformers.LogitsProcessorList([Looks()])
    inputs = tiny_models.prompts([3])
    model.generate(**inputs, max_new_tokens=1, logits_processor=looks, streamer=streamer)
    assert found == [{"streamer": streamer}, {}]


def test_a_generate_in_the_place_of_transformers_own_loses_no_argument(monkeypatch: pytest.MonkeyPatch):
    """Without `functools.wraps`, nothing but the frames tells what it calls."""
    own = transformers.GenerationMixin.generate
    instead = lambda self, *args, **kwargs: own(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(transformers.GenerationMixin, "generate", instead)
    model, streamer = tiny_models.model("llama"), transformers.TextStreamer(tiny_models.tokenizer())
    with pytest.raises(ValueError, match="transformers passes no streamer to a custom_generate function"):
        model.generate(**tiny_models.prompts([3]), custom_generate=generation.generate, streamer=streamer)


@pytest.mark.parametrize(
    "kind",
    [
        "alibi",
        pytest.param("bloom", marks=pytest.mark.skipif(RUNS_BLOOM, reason="this transformers runs Bloom as well")),
    ],
)
def test_an_error_of_a_model_becomes_one_sentence(kind: str):
    sentence = (
        rf"the forward of {type(tiny_models.model(kind)).__name__} failed in interleaved generation with \w+Error: .*; "
        "pass static_cache=False, or leave out interleaved"
    )
    with pytest.raises(ValueError, match=sentence):
        generate(kind, interleaved=True)
    assert torch.equal(generate(kind, interleaved=True, static_cache=False), generate(kind, custom_generate=None))


class OwnError(RuntimeError):
    """An error that a caller may catch."""


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyError("x"), ValueError), (OwnError("x"), OwnError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
@pytest.mark.parametrize("call", [0, 1], ids=["prompt", "step"])
def test_only_errors_without_a_class_of_their_own_are_reworded(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, seen: type[BaseException], call: int
):
    model = tiny_models.model("llama")
    forward, calls = type(model).forward, []

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) > call:
            raise raised
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", fails)
    with pytest.raises(seen) as caught:
        generate(interleaved=True, static_cache=False)
    assert (caught.value is raised) == (seen is not ValueError)
    if seen is ValueError:
        assert str(caught.value).endswith("with KeyError: 'x'; leave out interleaved to use transformers' own loop")
