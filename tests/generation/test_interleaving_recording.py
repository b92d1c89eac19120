"""The recording that stands for a CUDA graph."""

import pytest
import torch
from recorded_steps import CaptureError, FreedError, Recording


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
