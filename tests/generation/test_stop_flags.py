"""Stop flags, the seam to the loop of transformers."""

import torch
import transformers
from late_device import LateChannel

from vllm_async_spec.generation.stop_flags import StopFlags
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList


def flags(channel: LateChannel, finished: list[bool]) -> StopFlags:
    criteria = AsyncStoppingCriteriaList([Says(finished)], starts_unfinished=True, open_channel=channel.open)
    return criteria(torch.ones(len(finished), 4, dtype=torch.long), None)


class Says(transformers.StoppingCriteria):
    def __init__(self, finished: list[bool]):
        self.finished = torch.tensor(finished)

    def __call__(self, input_ids, scores, **kwargs):
        return self.finished


def test_the_maximum_is_what_the_host_knows():
    late = ~flags(LateChannel(1), [True, True])
    assert int(late.max()) == 1
    known = ~flags(LateChannel(0), [True, True])
    assert int(known.max()) == 0
    assert known.max().device.type == "cpu"


def test_everything_else_is_computed_behind_the_side_stream():
    channel = LateChannel(5)
    unfinished = torch.ones(2, dtype=torch.long) & ~flags(channel, [True, False])
    assert channel.joins == 0
    pads = torch.tensor([4, 4]) * unfinished + 9 * (1 - unfinished)
    assert pads.tolist() == [9, 4]
    assert channel.joins == 1
    assert type(pads) is torch.Tensor


def test_rows_of_another_origin_are_not_taken_for_those_of_the_step_before():
    criteria = AsyncStoppingCriteriaList([Says([False, False])], open_channel=LateChannel(5).open)
    for length in (4, 5):
        unfinished = torch.tensor([0, 1]) & ~criteria(torch.ones(2, length, dtype=torch.long), None)
    assert unfinished.tolist() == [0, 1]


def test_a_row_that_the_loop_ends_at_its_first_token_stays_ended():
    criteria = AsyncStoppingCriteriaList([Says([False, False])], open_channel=LateChannel(0).open)
    unfinished = torch.tensor([0, 1]) & ~criteria(torch.ones(2, 4, dtype=torch.long), None)
    assert unfinished.tolist() == [0, 1]
    unfinished = (unfinished & torch.tensor([1, 0])) & ~criteria(torch.ones(2, 5, dtype=torch.long), None)
    assert bool(unfinished.max() == 0)


def test_flags_inside_of_another_argument_are_computed_too():
    channel = LateChannel(5)
    criteria = AsyncStoppingCriteriaList([Says([True, False])], open_channel=channel.open)
    finished = criteria(torch.ones(2, 4, dtype=torch.long), None)
    assert torch.stack([~finished, ~finished]).tolist() == [[0, 1]] * 2
    assert channel.joins == 1
    assert torch.where(condition=finished, input=torch.zeros(2), other=torch.ones(2)).tolist() == [0, 1]
    assert torch.add(torch.zeros(2), other=~finished).tolist() == [0, 1]
    assert (~finished)[(~finished,)].tolist() == [0, 1]
    assert channel.joins == 1


def test_rows_of_a_step_are_not_taken_for_those_of_the_step_before():
    says = Says([False, False])
    criteria = AsyncStoppingCriteriaList([says], open_channel=LateChannel(5).open)
    earlier = ~criteria(torch.ones(2, 4, dtype=torch.long), None)
    says.finished = torch.tensor([True, False])
    later = ~criteria(torch.ones(2, 5, dtype=torch.long), None)
    assert (earlier & later).tolist() == (later & earlier).tolist() == [0, 1]
