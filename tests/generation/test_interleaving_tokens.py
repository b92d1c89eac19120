"""Interleaved generation against the loop of transformers, on a late device; `recorded` steps are repeated."""

from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import RowsStopAt, may_wait, seeded, ways_to_stop
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving_runs import Favours, as_graphs, assert_same, both, recorded, ways
from late_device import LateChannel
from recorded_steps import RecordedSteps, Recording
from transformers.cache_utils import StaticSlidingWindowLayer

from vllm_async_spec import generation
from vllm_async_spec.generation import decode, decode_tail, interleaved, workspace

__all__ = ["recorded"]  # a fixture
pytestmark = may_wait


def replays(kind: str) -> int:
    kept = workspace._kept[tiny_models.model(kind)]
    assert isinstance(kept.graphs, RecordedSteps)
    return kept.graphs.replays


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["llama", "gpt2", "sliding", "hybrid"]))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    kwargs: dict[str, Any] = {"max_new_tokens": draw(st.integers(1, 12)), "do_sample": draw(st.booleans())}
    if kwargs["do_sample"] and draw(st.booleans()):
        kwargs |= {"temperature": 1.5, "top_k": 5, "top_p": 0.8}
    kwargs |= draw(st.sampled_from([{}, {"repetition_penalty": 1.4}, {"suppress_tokens": [3]}, {"min_new_tokens": 3}]))
    if draw(st.booleans()):
        kwargs["logits_processor"] = lambda: transformers.LogitsProcessorList([Favours()])
    kwargs |= draw(ways_to_stop(lengths))
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


GROWS = {"interleaved": True, "static_cache": False}


def test_a_model_that_counts_positions_itself_gets_none_from_a_mask():
    expected, found = both("counts positions", tiny_models.prompts([1, 5, 3, 2, 4]), GROWS, max_new_tokens=30)
    assert_same(expected, found)


def test_positions_by_the_models_own_rule_are_refused_where_transformers_gives_none():
    def run():
        return both("own positions", tiny_models.prompts([2, 5, 4]), GROWS, max_new_tokens=12)

    if hasattr(transformers.GenerationMixin, "_get_initial_cache_position"):  # transformers 4
        with pytest.raises(ValueError, match="XLMRobertaXLForCausalLM has a rule of its own for them; leave out"):
            run()
    else:
        assert_same(*run())


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding", "hybrid"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_recorded_steps_generate_the_same_tokens(recorded: None, kind: str, batch: int, do_sample: bool):
    inputs = tiny_models.prompts([1 + row % 4 for row in range(batch)])
    channel = LateChannel(2)
    way = {"interleaved": True, "open_channel": channel.open, "max_in_flight": 3}
    expected, found = both(kind, inputs, way, max_new_tokens=15, do_sample=do_sample)
    assert_same(expected, found)
    assert replays(kind) == 14


@pytest.mark.parametrize("whole", [True, False], ids=["end of sequence", "custom criterion"])
def test_overshoot_runs_and_leaves_no_trace(recorded: None, whole: bool):
    inputs = tiny_models.prompts([3] * 8)
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
    inputs = tiny_models.prompts([3, 1])
    way = {"interleaved": True, "open_channel": LateChannel(1).open}
    for kind in ("sliding", "hybrid"):
        expected, found = both(kind, inputs, way, max_new_tokens=60)
        assert torch.equal(expected[0], found[0])


def test_a_recorded_step_of_a_counting_layer_goes_wrong(recorded: None, monkeypatch: pytest.MonkeyPatch):
    def with_windows(model: Any, tokens: int) -> Any:
        return transformers.StaticCache(config=model.config, max_cache_len=tokens)

    monkeypatch.setattr(interleaved, "full_static_cache", with_windows)
    inputs = tiny_models.prompts([3, 1])
    assert any(type(each) is StaticSlidingWindowLayer for each in with_windows(tiny_models.model("sliding"), 62).layers)
    try:
        expected, found = both("sliding", inputs, {"interleaved": False}, max_new_tokens=60)
    except (IndexError, RuntimeError):
        return
    assert not torch.equal(expected[0], found[0])


def test_what_the_host_knows_is_never_overshot(recorded: None):
    inputs = tiny_models.prompts([3, 2])
    way = {"interleaved": True, "open_channel": LateChannel(10).open, "max_in_flight": 20}
    expected, found = both("llama", inputs, way, max_length=9)
    assert_same(expected, found)
    assert replays("llama") == 5


def test_a_finish_that_is_learnt_of_only_at_max_length_still_counts(recorded: None):
    inputs = tiny_models.prompts([3])
    channel = LateChannel(10**6)
    way = {"interleaved": True, "open_channel": channel.open, "max_in_flight": 30, "poll_every": 4}
    stop = {"stopping_criteria": lambda: transformers.StoppingCriteriaList([RowsStopAt([5])])}
    expected, found = both("llama", inputs, way, max_length=13, do_sample=True, **stop)
    assert found[0].shape == (1, 5)
    assert_same(expected, found)


CRITERIA = {"length": transformers.MaxLengthCriteria(12), "int": lambda ids, scores: torch.tensor([ids.shape[1] // 6])}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_a_criterion_of_the_caller(static: bool, criterion: Any):
    stop = {"stopping_criteria": lambda: transformers.StoppingCriteriaList([criterion])}
    given = {"max_new_tokens": 5, **tiny_models.prompts([3])}
    way = {"custom_generate": generation.generate, **ways(), "static_cache": static}
    assert_same(*(seeded(tiny_models.model("llama"), given, each, **stop) for each in ({}, way)))


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


@pytest.mark.parametrize("kind", decode_tail.OF_SCORES_ALONE)
def test_a_processor_of_scores_alone_is_one(kind: type):
    processor = kind(*PROCESSORS[kind.__name__])
    scores, other = torch.randn(2, 3, 50)
    given = scores.clone()
    with Recording() as recording:
        found = processor(None, given)
    given.copy_(other)
    recording.replay()
    assert torch.equal(found, processor(None, other.clone()))
    assert not torch.equal(found, processor(None, scores.clone()))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "hybrid"])
@pytest.mark.parametrize("lengths", [[3, 2], [3, 3]], ids=["padded", "not padded"])
@pytest.mark.parametrize("compiled", ["eager", {"backend": "eager"}], ids=["name", "arguments"])
def test_a_compiled_step_generates_the_same_tokens(kind: str, lengths: list[int], compiled: Any):
    inputs = tiny_models.prompts(lengths)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, found = both(kind, inputs, {**ways(), "torch_compile": compiled}, max_new_tokens=9, eos_token_id=2)
    assert_same(expected, found)
    # The forward, and what is written of either slot; each once, whatever the length.
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] > 0, "nothing was compiled"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


class Remembers(transformers.LogitsProcessor):
    """A custom processor that keeps the scores of earlier steps, and lowers a token that was likely before."""

    def __init__(self):
        self.kept: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.kept.append(scores)
        return scores - 0.9 * self.kept[-3] if len(self.kept) > 2 else scores


def test_a_processor_may_keep_the_scores_of_earlier_steps(recorded: None):
    given: dict[str, Any] = {"logits_processor": lambda: [Remembers()], "max_new_tokens": 12}
    assert_same(*both("llama", tiny_models.prompts([4, 2]), ways(), **given))
    assert replays("llama") > 0


@pytest.mark.parametrize(("processors", "copies"), [({"repetition_penalty": 1.4}, 0), ({"logits_processor": None}, 1)])
def test_only_for_code_from_outside_is_a_graphs_output_copied(
    recorded: None, monkeypatch: pytest.MonkeyPatch, processors: dict[str, Any], copies: int
):
    given = {"logits_processor": lambda: [Favours()]} if copies else processors
    own, launched = RecordedSteps.replay, []
    launch = decode.Decode.launch
    monkeypatch.setattr(RecordedSteps, "replay", lambda *args: launched.append(own(*args)) or launched[-1])
    monkeypatch.setattr(decode.Decode, "launch", lambda *args: launched.append(launch(*args)) or launched[-1])
    both("llama", tiny_models.prompts([4, 2]), ways(), max_new_tokens=5, **given)
    assert [each is other for each, other in zip(launched[::2], launched[1::2], strict=True)] == [not copies] * 4
