"""Interleaved generation against the synchronous loop of transformers, on a device whose flags are late.

Runs with whichever transformers is installed; `make test-transformers` runs it with 4.57. Where a test says `recorded`,
the steps are recorded once and then repeated, as CUDA graphs are.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

import tiny_models
import transformers
from generating import RowsStopAt, StopsOnceOn, seeded
from late_device import LateChannel
from recorded_steps import CaptureError, FreedError, RecordedSteps, Recording
from transformers.cache_utils import StaticSlidingWindowLayer

from vllm_async_spec import generation
from vllm_async_spec.generation import decode, decode_tail, interleaved, workspace
from vllm_async_spec.generation.interleaved import DecodeSwitches
from vllm_async_spec.generation.workspace import MemoryReport, reserved

pytestmark = pytest.mark.filterwarnings("ignore::vllm_async_spec.generation.SynchronousGenerationWarning")
IS_4 = transformers.__version__.startswith("4.")


@pytest.fixture
def recorded():
    """As `as_graphs`, for one test."""
    with as_graphs():
        yield


@contextlib.contextmanager
def as_graphs() -> Iterator[None]:
    """Steps are recorded and repeated, as on a GPU; what was kept for models before is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "StepGraphs", RecordedSteps)
        patch.setattr(interleaved, "_captures", lambda switches, device: switches.cuda_graphs)
        patch.setattr(workspace, "_kept", type(workspace._kept)())
        yield


class Favours(transformers.LogitsProcessor):
    """A custom processor that looks at how many tokens there are, and at the last of them."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = (input_ids[:, -1] + input_ids.shape[1]) % scores.shape[1]
        return scores + 3.0 * torch.nn.functional.one_hot(favoured, scores.shape[1])


def both(kind: str, inputs: dict[str, Any], way: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    """Generate as transformers does and with our loop, from the same seed: tokens, and the generator's state."""
    model = tiny_models.model(kind)
    cache = {"cache_implementation": "static"} if way.get("static_cache", True) else {}
    ours = {"custom_generate": generation.generate, **way}
    return seeded(model, inputs, cache, **kwargs), seeded(model, inputs, ours, **kwargs)


def assert_same(expected: tuple[Any, Any], found: tuple[Any, Any]) -> None:
    assert torch.equal(expected[0], found[0])
    assert expected[0].stride() == found[0].stride()
    assert torch.equal(expected[1], found[1]), "the random generator is elsewhere"


def replays(kind: str) -> int:
    kept = workspace._kept[tiny_models.model(kind)]
    assert isinstance(kept.graphs, RecordedSteps)
    return kept.graphs.replays


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["llama", "gpt2", "sliding", "hybrid"]))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    stops = draw(st.sets(st.sampled_from(["eos", "stop strings", "custom", "once", "time"])))
    kwargs: dict[str, Any] = {"max_new_tokens": draw(st.integers(1, 12)), "do_sample": draw(st.booleans())}
    if kwargs["do_sample"] and draw(st.booleans()):
        kwargs |= {"temperature": 1.5, "top_k": 5, "top_p": 0.8}
    kwargs |= draw(st.sampled_from([{}, {"repetition_penalty": 1.4}, {"suppress_tokens": [3]}, {"min_new_tokens": 3}]))
    if draw(st.booleans()):
        kwargs["logits_processor"] = lambda: transformers.LogitsProcessorList([Favours()])
    kwargs["eos_token_id"] = draw(st.sampled_from([2, [2, 3, 5, 8]])) if "eos" in stops else None
    custom: list[Any] = []
    if "custom" in stops:
        custom.append(RowsStopAt([max(lengths) + draw(st.integers(1, 9)) for _ in lengths]))
    if "once" in stops:
        custom.append(StopsOnceOn(draw(st.integers(0, tiny_models.VOCABULARY - 1))))
    if "stop strings" in stops:
        custom.append(transformers.StopStringCriteria(tiny_models.tokenizer(), draw(st.sampled_from(["c", "de", "f"]))))
    if "time" in stops:
        kwargs["max_time"] = draw(st.integers(1, 9)) - 0.5
    kwargs["stopping_criteria"] = lambda: transformers.StoppingCriteriaList(custom)
    way: dict[str, Any] = {"interleaved": True, "static_cache": draw(st.booleans())}
    if draw(st.integers(0, 4)):
        way["open_channel"] = LateChannel(draw(st.integers(0, 4)), seed=draw(st.none() | st.integers(0, 99))).open
        way |= {"poll_every": draw(st.integers(1, 3)), "max_in_flight": draw(st.integers(1, 3))}
    else:
        way["interleaved"] = False
    return {
        "kind": kind,
        "inputs": tiny_models.prompts(lengths, draw(st.sampled_from(["left", "right"])), draw(st.integers(0, 99))),
        "way": way,
        "recorded": way["static_cache"] and draw(st.booleans()),
        "kwargs": kwargs,
    }


@settings(max_examples=120)
@given(cases())
def test_it_is_the_synchronous_loop_however_late_the_flags_are(case: dict[str, Any]):
    if case["recorded"]:
        with as_graphs():
            expected, found = both(case["kind"], case["inputs"], case["way"], **case["kwargs"])
    else:
        expected, found = both(case["kind"], case["inputs"], case["way"], **case["kwargs"])
    assert_same(expected, found)


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding", "hybrid"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_recorded_steps_generate_the_same_tokens(recorded: None, kind: str, batch: int, do_sample: bool):
    inputs = tiny_models.prompts([1 + row % 4 for row in range(batch)], "left")
    channel = LateChannel(2)
    way = {"interleaved": True, "open_channel": channel.open, "max_in_flight": 3}
    expected, found = both(kind, inputs, way, max_new_tokens=15, do_sample=do_sample)
    assert_same(expected, found)
    assert replays(kind) == 14


@pytest.mark.parametrize("whole", [True, False], ids=["end of sequence", "custom criterion"])
def test_overshoot_runs_and_leaves_no_trace(recorded: None, whole: bool):
    inputs = tiny_models.prompts([3] * 8, "left")
    channel = LateChannel(3)
    stop: dict[str, Any] = {"eos_token_id": [2, 3, 5]}
    if not whole:
        stop |= {
            "stopping_criteria": lambda: transformers.StoppingCriteriaList([RowsStopAt([5 + i for i in range(8)])])
        }
    way = {"interleaved": True, "open_channel": channel.open, "max_in_flight": 4}
    expected, found = both("llama", inputs, way, do_sample=True, max_new_tokens=40, **stop)
    assert_same(expected, found)
    steps = expected[0].shape[1] - 3
    assert 3 < steps < 36, "the rows of the loop that was measured don't stop early"
    assert (expected[0][:, -1] == 0).sum() >= 4, "too few rows stop early"
    assert channel.sent == steps + 3, "it ran no overshoot"
    assert replays("llama") == steps + 2
    assert channel.waits == 0


def test_a_window_that_passes_is_in_the_mask(recorded: None):
    inputs = tiny_models.prompts([3, 1], "left")
    way = {"interleaved": True, "open_channel": LateChannel(1).open}
    for kind in ("sliding", "hybrid"):
        expected, found = both(kind, inputs, way, max_new_tokens=60)
        assert torch.equal(expected[0], found[0])


def test_a_recorded_step_of_a_counting_layer_goes_wrong(recorded: None, monkeypatch: pytest.MonkeyPatch):
    """What `full_static_cache` is for: a window's layer that counts on the host is frozen with the count."""

    def with_windows(model: Any, tokens: int) -> Any:
        return transformers.StaticCache(config=model.config, max_cache_len=tokens)

    monkeypatch.setattr(interleaved, "full_static_cache", with_windows)
    inputs = tiny_models.prompts([3, 1], "left")
    assert any(type(each) is StaticSlidingWindowLayer for each in with_windows(tiny_models.model("sliding"), 62).layers)
    try:
        expected, found = both("sliding", inputs, {"interleaved": False}, max_new_tokens=60)
    except (IndexError, RuntimeError):
        return
    assert not torch.equal(expected[0], found[0])


def test_what_the_host_knows_is_never_overshot(recorded: None):
    inputs = tiny_models.prompts([3, 2], "left")
    way = {"interleaved": True, "open_channel": LateChannel(10).open, "max_in_flight": 20}
    expected, found = both("llama", inputs, way, max_length=9)
    assert_same(expected, found)
    assert replays("llama") == 5


def test_a_finish_that_is_learnt_of_only_at_max_length_still_counts(recorded: None):
    inputs = tiny_models.prompts([3], "left")
    channel = LateChannel(10**6)
    way = {"interleaved": True, "open_channel": channel.open, "max_in_flight": 30, "poll_every": 4}
    stop = {"stopping_criteria": lambda: transformers.StoppingCriteriaList([RowsStopAt([5])])}
    expected, found = both("llama", inputs, way, max_length=13, do_sample=True, **stop)
    assert found[0].shape == (1, 5)
    assert_same(expected, found)


def test_the_draw_is_that_of_multinomial():
    chances = torch.rand(64, 500)
    states = []
    drawn = []
    for draw in (
        lambda: torch.multinomial(chances, num_samples=1).squeeze(1),
        lambda: torch.argmax(chances / torch.empty_like(chances).exponential_(1), dim=-1),
    ):
        torch.manual_seed(1)
        drawn.append(draw())
        states.append(torch.get_rng_state())
    assert torch.equal(*drawn)
    assert torch.equal(*states)


PROCESSORS = {
    "EpsilonLogitsWarper": (1e-3,),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "MinPLogitsWarper": (0.1,),
    "TemperatureLogitsWarper": (0.7,),
    "TopKLogitsWarper": (5,),
    "TopPLogitsWarper": (0.8,),
    "TypicalLogitsWarper": (0.9,),
}


@pytest.mark.parametrize("kind", decode_tail.OF_SCORES_ALONE, ids=lambda kind: kind.__name__)
def test_a_processor_of_scores_alone_is_one(kind: type):
    """It can be recorded, looks at no token, and does the same to other scores when it is repeated."""
    processor = kind(*PROCESSORS[kind.__name__])
    scores, other = torch.randn(2, 3, 50)
    given = scores.clone()
    with Recording() as recording:
        found = processor(None, given)
    given.copy_(other)
    recording.replay()
    assert torch.equal(found, processor(None, other.clone()))
    assert not torch.equal(found, processor(None, scores.clone()))


# --- what is kept ------------------------------------------------------------------------------------------------


def ways() -> dict[str, Any]:
    return {"interleaved": True, "open_channel": LateChannel(1).open}


def test_a_second_generation_uses_what_was_made_for_the_first(recorded: None):
    inputs = tiny_models.prompts([3, 2], "left")
    model = tiny_models.model("llama")
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    first = workspace._kept[model]
    for seed, new_tokens in ((1, 20), (2, 7)):
        assert_same(*both("llama", tiny_models.prompts([1, 3], "left", seed), ways(), max_new_tokens=new_tokens))
        assert workspace._kept[model] is first


def test_a_second_generation_reads_nothing_that_went_with_the_first(recorded: None):
    """Ids of the end and of padding are made by transformers at each call; a captured step reads those of its own."""
    inputs = tiny_models.prompts([3, 2], "left", 3)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": [2, 5], "pad_token_id": 1}
    for two_slots in (True, False):
        expected, found = both("llama", inputs, {**ways(), "interleaved": two_slots}, **settings)
        assert (expected[0][:, -1] == 1).sum() == 1, "no row stops before the other, so that none is padded"
        assert_same(expected, found)


@pytest.mark.parametrize(
    "other",
    [
        {"max_new_tokens": 21},
        {"temperature": 0.7},
        {"eos_token_id": 4},
        {"pad_token_id": 3},
        {"do_sample": False},
        {"top_k": 3},
        {"logits_processor": lambda: transformers.LogitsProcessorList([Favours()])},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_a_recorded_step_depends_on_is_looked_at(recorded: None, other: dict[str, Any]):
    inputs = tiny_models.prompts([3, 2], "left")
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": 2}
    assert_same(*both("llama", inputs, ways(), **settings))
    first = workspace._kept[tiny_models.model("llama")]
    assert_same(*both("llama", inputs, ways(), **settings | other))
    assert workspace._kept[tiny_models.model("llama")] is not first


def test_weights_that_moved_are_noticed(recorded: None):
    inputs = tiny_models.prompts([3, 2], "left")
    model = tiny_models.model("llama")
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    before = model.lm_head.weight.data
    try:
        model.lm_head.weight.data = before.flip(0).contiguous()
        assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    finally:
        model.lm_head.weight.data = before


def test_it_runs_in_inference_mode_and_out_of_it(recorded: None):
    inputs = tiny_models.prompts([3, 2], "left")
    with torch.inference_mode():
        assert_same(*both("llama", inputs, ways(), max_new_tokens=9))
    assert_same(*both("llama", inputs, ways(), max_new_tokens=9))


def test_release_frees_it(recorded: None):
    model = tiny_models.model("llama")
    generation.release(model)
    both("llama", tiny_models.prompts([3], "left"), ways(), max_new_tokens=9)
    report = generation.memory_report(model)
    # Keys and values of two layers, two heads of 8 floats, 11 tokens; nothing is reserved without a GPU.
    assert report.cache == 2 * 2 * 2 * 11 * 8 * 4
    assert report.buffers > 0
    assert (report.graph_pool, report.streams) == (0, ())
    assert report.total == report.cache + report.buffers
    generation.release(model)
    with pytest.raises(
        LookupError, match="no workspace is kept for this LlamaForCausalLM; generate with interleaved=True"
    ):
        generation.memory_report(model)


def test_the_limit_of_memory_is_kept(recorded: None):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3], "left")
    both("llama", inputs, ways(), max_new_tokens=9)
    held = generation.memory_report(model).total
    both("llama", inputs, {**ways(), "memory_limit": held}, max_new_tokens=9)
    with pytest.raises(ValueError, match=rf"holds {held} bytes .* and memory_limit is {held - 1}; raise the limit"):
        both("llama", inputs, {**ways(), "memory_limit": held - 1}, max_new_tokens=9)
    with pytest.raises(LookupError):
        generation.memory_report(model)


def test_segments_are_told_apart_by_pool_and_stream():
    def segment(size: int, stream: int, pool: tuple[int, int] = (0, 0), expandable: bool = False) -> dict[str, Any]:
        return {"total_size": size, "stream": stream, "segment_pool_id": pool, "is_expandable": expandable}

    segments = [segment(1, 7), segment(2, 8), segment(4, 7, (0, 3)), segment(8, 9), segment(16, 8, (0, 4), True)]
    assert reserved(segments, pool=(0, 3), streams=(7, 8)) == (4, (1, 2), False)
    assert reserved(segments, pool=(0, 4), streams=()) == (16, (), True)
    assert reserved(segments, pool=None, streams=(9, 7)) == (0, (8, 1), False)
    assert MemoryReport(1, 2, 4, (8, 16), False).total == 31


# --- refusals ----------------------------------------------------------------------------------------------------


def test_the_cpu_is_synchronous_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_async_spec.generation.stopping_criteria._said", set())
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3, 2], "left")
    way = {"custom_generate": generation.generate, "interleaved": True}
    with pytest.warns(generation.SynchronousGenerationWarning, match="need a CUDA device, and input_ids are on cpu"):
        output = model.generate(**inputs, max_new_tokens=6, **way)
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=6))
    with warnings.catch_warnings():
        warnings.simplefilter("error", generation.SynchronousGenerationWarning)
        model.generate(**inputs, max_new_tokens=6, **way)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"num_beams": 2}, "not beam_search"),
        ({"return_dict_in_generate": True}, "returns only tokens, and return_dict_in_generate is set"),
        ({"use_cache": False}, "needs a cache, and use_cache is off"),
        ({"past_key_values": transformers.DynamicCache}, "makes its own cache, and past_key_values were passed"),
        ({"cache_implementation": "offloaded"}, "can't use the cache that cache_implementation='offloaded' selects"),
        ({"cache_implementation": "dynamic"}, "static_cache and cache_implementation='dynamic' contradict each other"),
        ({"prefill_chunk_size": 2}, "prefills prompts in one step, and prefill_chunk_size is set"),
        ({"poll_every": 0}, "poll_every is 0; it must be at least 1"),
        ({"max_in_flight": -1}, "max_in_flight is -1; it must be at least 1"),
        ({"static_cache": False, "cuda_graphs": True}, "cuda_graphs needs static_cache"),
        ({"static_cache": False, "torch_compile": True}, "torch_compile needs static_cache"),
        ({"static_cache": False, "torch_compile": {}}, "torch_compile needs static_cache"),
        ({"torch_compile": 2}, "torch_compile is 2; it must be bool or str or dict"),
        ({"torch_compile": {"dynamic": True}}, "torch_compile has the argument 'dynamic'; it takes only backend, full"),
        (
            {"torch_compile": {"mode": "default", "options": {}}},
            "both the mode 'default' and options, but PyTorch takes only one",
        ),
        (
            {"torch_compile": {"mode": "reduce-overhead"}},
            "makes its own CUDA graphs, but this package already captures",
        ),
        ({"torch_compile": {"options": {"triton.cudagraphs": True}}}, "use the mode 'max-autotune-no-cudagraphs'"),
        ({"cuda_graphs": "yes"}, "cuda_graphs is 'yes'; it must be bool"),
        ({"memory_limit": 0}, "memory_limit is 0; it must be at least 1 byte"),
        ({"memory_limit": 2.5}, "memory_limit is 2.5; it must be int or NoneType"),
        ({"interleaved": None, "static_cache": True}, "static_cache is True, and transformers' own loop has no such"),
        ({"interleaved": 1}, "interleaved is 1; it must be bool"),
    ],
)
def test_what_it_can_not_do_is_refused_in_a_sentence(kwargs: dict[str, Any], sentence: str):
    model = tiny_models.model("llama")
    given = {"interleaved": True, **{name: make() if isinstance(make, type) else make for name, make in kwargs.items()}}
    with pytest.raises(ValueError, match=sentence):
        model.generate(
            **tiny_models.prompts([3], "left"), max_new_tokens=3, custom_generate=generation.generate, **given
        )


def test_other_models_are_refused_by_name():
    model = tiny_models.model("encoder-decoder")
    with pytest.raises(
        ValueError, match="only decoder-only models, and T5ForConditionalGeneration has an encoder; leave out"
    ):
        model.generate(
            **tiny_models.prompts([3], "left"),
            max_new_tokens=3,
            custom_generate=generation.generate,
            interleaved=True,
        )


def test_embeddings_of_the_prompt_are_refused():
    model = tiny_models.model("llama")
    embeddings = model.get_input_embeddings()(tiny_models.prompts([3], "left")["input_ids"])
    with pytest.raises(ValueError, match="gives the model only tokens, and inputs_embeds was passed"):
        model.generate(
            inputs_embeds=embeddings, max_new_tokens=3, custom_generate=generation.generate, interleaved=True
        )


def test_a_step_that_reads_the_device_is_refused(recorded: None, monkeypatch: pytest.MonkeyPatch):
    model = tiny_models.model("llama")
    forward = type(model).forward

    def reads(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert int(input_ids.max()) >= 0
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", reads)
    generation.release(model)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM can't be captured in a CUDA graph: .* pass cuda_graphs=False"
    ):
        both("llama", tiny_models.prompts([3], "left"), ways(), max_new_tokens=9)


def test_memory_that_runs_out_is_said_to_run_out(recorded: None, monkeypatch: pytest.MonkeyPatch):
    def runs_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decode, "StepGraphs", runs_out)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        both("llama", tiny_models.prompts([3], "left"), ways(), max_new_tokens=9)


def test_a_second_thread_is_refused():
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3], "left")
    inside, go_on, errors = threading.Event(), threading.Event(), []

    class Waits(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            inside.set()
            go_on.wait(30)
            return scores

    def run(*processors: Any) -> None:
        model.generate(
            **inputs, max_new_tokens=3, custom_generate=generation.generate, interleaved=True,
            logits_processor=transformers.LogitsProcessorList(processors),
        )  # fmt: skip

    def first() -> None:
        try:
            run(Waits())
        except Exception as error:  # shown by the assertion
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(RuntimeError, match="this LlamaForCausalLM already generates, in another thread"):
            run()
    finally:
        go_on.set()
        thread.join()
    assert not errors
    run()


def test_expandable_segments_need_a_gpu_and_come_first(monkeypatch: pytest.MonkeyPatch):
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="need a CUDA device, and PyTorch finds none; leave out"):
            generation.use_expandable_segments()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late for expandable segments; call use_expandable_segments"):
        generation.use_expandable_segments()


def test_expandable_segments_leave_other_settings_be(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    generation.use_expandable_segments()
    assert told == ["max_split_size_mb:64,expandable_segments:True"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "hybrid"])
@pytest.mark.parametrize("lengths", [[3, 2], [3, 3]], ids=["padded", "not padded"])
@pytest.mark.parametrize("compiled", ["eager", {"backend": "eager"}], ids=["name", "arguments"])
def test_a_compiled_step_generates_the_same_tokens(kind: str, lengths: list[int], compiled: Any):
    inputs = tiny_models.prompts(lengths, "left")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, found = both(kind, inputs, {**ways(), "torch_compile": compiled}, max_new_tokens=9, eos_token_id=2)
    assert_same(expected, found)
    # The forward, and what is written of either slot; each once, whatever the length.
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] > 0, "nothing was compiled"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_switches_follow_each_other():
    assert DecodeSwitches.of(None) is None
    assert DecodeSwitches.of(True) == DecodeSwitches(interleaved=True)
    assert DecodeSwitches.of(False, static_cache=False) == DecodeSwitches(False, static_cache=False, cuda_graphs=False)


@pytest.mark.parametrize(
    ("chosen", "arguments"),
    [
        (False, None),
        (True, {"backend": "inductor"}),
        ("eager", {"backend": "eager"}),
        ({}, {}),
        ({"mode": "max-autotune-no-cudagraphs"}, {"mode": "max-autotune-no-cudagraphs"}),
        ({"options": {"max_autotune": True}}, {"options": {"max_autotune": True}}),
    ],
)
def test_what_is_compiled_with_is_what_was_asked_for(chosen: Any, arguments: dict[str, Any] | None):
    assert DecodeSwitches(True, torch_compile=chosen).compiles_with == arguments


# --- the recording -----------------------------------------------------------------------------------------------


def test_a_recording_freezes_what_comes_from_the_host():
    counter, seen = torch.zeros(1), torch.zeros(1)
    host = [5.0]
    with Recording() as recording:
        counter.add_(1)
        seen.copy_(counter * host[0])
    host[0] = 7.0
    recording.replay()
    assert (counter.item(), seen.item()) == (2.0, 10.0)


def test_a_recording_refuses_host_reads():
    with pytest.raises(CaptureError, match="_local_scalar_dense"), Recording():
        torch.ones(1).item()
    with pytest.raises(CaptureError, match="index"), Recording():
        torch.ones(2)[torch.tensor([True, False])]


def test_a_recording_keeps_nothing_alive_but_what_it_made():
    seen, given = torch.zeros(1), torch.ones(1)
    with Recording() as recording:
        made = given + 1
        seen.copy_(made)
    del made
    recording.replay()
    assert seen.item() == 2.0
    del given
    with pytest.raises(FreedError, match=r"aten.add.Tensor reads a tensor that was freed"):
        recording.replay()
