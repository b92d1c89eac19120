"""What a stopping criterion may answer, and what a loop of one's own gets from `AsyncStoppingCriteriaList`."""

from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import RowsStopAt, late, may_wait
from late_device import LateChannel

from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList

LIMITS = [transformers.MaxLengthCriteria(5), transformers.MaxTimeCriteria(0.0, initial_timestamp=0.0)]


def ids(length: int, batch: int = 2) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.long)


@pytest.mark.parametrize("limit", LIMITS, ids=["length", "time"])
@pytest.mark.parametrize("others", [[], [RowsStopAt([4, 9])]], ids=["alone", "beside"])
@pytest.mark.parametrize("lateness", [0, 9])
def test_the_verdict_has_what_the_host_decides(limit: Any, others: list[Any], lateness: int):
    stock = transformers.StoppingCriteriaList([limit, *others])
    own = AsyncStoppingCriteriaList([limit, *others], open_channel=LateChannel(lateness).open)
    for length in (3, 4, 5):
        expected = stock(ids(length), None)
        assert own(ids(length), None).tolist() == expected.tolist()
        assert own.stopped == bool(expected.all())
        if own.stopped:
            break
    assert own.finish() == 0


def test_flags_of_a_step_do_not_change_when_the_host_stops_the_next():
    own = AsyncStoppingCriteriaList([transformers.MaxLengthCriteria(5)], open_channel=LateChannel(0).open)
    before, last = own(ids(4), None), own(ids(5), None)
    assert (before.tolist(), last.tolist()) == ([False, False], [True, True])


@pytest.mark.parametrize("lateness", [0, 9])
@pytest.mark.parametrize("criterion", [transformers.MaxLengthCriteria(5), RowsStopAt([4, 5])], ids=["host", "flags"])
def test_all_steps_after_the_stop_are_extra_ones(criterion: Any, lateness: int):
    own = AsyncStoppingCriteriaList([criterion], open_channel=LateChannel(lateness).open)
    drawn = {}
    for length in range(3, 12):
        drawn[length] = torch.rand(1)
        own(ids(length), None)
    assert own.finish() == 6
    assert torch.equal(torch.rand(1), drawn[6])


# Shapes


class Answers(transformers.StoppingCriteria):
    """A criterion of one's own whose flags have a shape of its own."""

    def __init__(self, answer: Any):
        self.answer = answer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.answer(input_ids.shape[1] >= 7, len(input_ids))


def column(stops: bool, batch: int) -> torch.Tensor:
    return torch.full((batch, 1), stops)


ANSWERS = {
    "a column": column,
    "a lone flag": lambda stops, batch: torch.tensor([stops]),
    "no dimension": lambda stops, batch: torch.tensor(stops),
    "a number": lambda stops, batch: torch.full((batch,), int(stops)),
    "a bool": lambda stops, batch: stops,
}
WAYS = [{}, {"interleaved": True}, {"interleaved": False}]


@may_wait
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shape", list(ANSWERS))
def test_flags_for_each_row_or_for_all_are_understood(shape: str, batch: int, way: dict[str, Any]):
    model, inputs = tiny_models.model("llama"), tiny_models.prompts([4] * batch)
    expected = model.generate(**inputs, max_new_tokens=3)
    criteria = [Answers(ANSWERS[shape])]
    found = model.generate(**inputs, max_new_tokens=9, stopping_criteria=criteria, **late(LateChannel(1), **way))
    assert torch.equal(found, expected)


@may_wait
@pytest.mark.parametrize("way", WAYS)
def test_other_flags_are_refused_in_a_sentence(way: dict[str, Any]):
    criteria = [Answers(lambda stops, batch: torch.full((3, batch), stops))]
    with pytest.raises(
        ValueError,
        match=r"the stopping criterion Answers returned flags of shape \(3, 2\); it must return shape \(2,\)",
    ):
        tiny_models.model("llama").generate(
            **tiny_models.prompts([4, 4]), max_new_tokens=9, stopping_criteria=criteria, **late(LateChannel(1), **way)
        )


# One generation


@may_wait
@pytest.mark.parametrize("channel", [LateChannel(0).open, lambda *_: None], ids=["late", "synchronous"])
def test_a_list_serves_one_generation(channel: Any):
    own = AsyncStoppingCriteriaList([RowsStopAt([6, 6])], open_channel=channel)
    for length in (4, 5, 5, 6):
        own(ids(length), None)
    with pytest.raises(RuntimeError, match=r"serves one generation, and its sequences shrank from 6 to 4 tokens; make"):
        own(ids(4), None)
    assert own.finish() == own.finish() == 0
    for length in (4, 7):
        with pytest.raises(RuntimeError, match=r"serves one generation, and finish\(\) has ended it; make a new list"):
            own(ids(length), None)
