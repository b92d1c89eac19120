"""What the simulated device records is bounded by what is alive, whatever the length of a loop."""

from typing import Any

import compat_planted as planted
import torch
from compat_checked import checked

from vllm_async_spec.audit import host_reads
from vllm_async_spec.compat.simulated_device import SimulatedDevice

STEPS = 4 * host_reads._SWEEP


def alive(device: SimulatedDevice) -> int:
    """Storages that the device knows and whose memory is not freed."""
    return sum(not storage.expired() for _, storage in device._written.values())


def test_a_loop_for_each_token_leaves_no_tensor_behind():
    device = SimulatedDevice()
    with device.watching():
        keys = device.place(torch.ones(64, dtype=torch.int32))
        most = 0
        for _ in range(STEPS):
            seen = keys + 1
            most = max(most, len(device._written))
        assert device.holds(seen), "what is alive is still known"
    assert alive(device) == 2
    assert most <= host_reads._SWEEP + 2


def test_entries_of_what_is_alive_are_kept():
    device = SimulatedDevice()
    with device.watching():
        keys = device.place(torch.ones(1, dtype=torch.int32))
        kept = [keys + 1 for _ in range(host_reads._SWEEP + 10)]
    assert all(device.holds(each) for each in kept)
    assert alive(device) == len(kept) + 1


def test_a_loop_that_waits_for_each_token_is_one_wait():
    class EachToken(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            return sum(metadata.seq_lens[0].item() for _ in range(200))

    found = checked(EachToken, "decode")
    assert [len(build.waits) for build in found.cases[0].builds] == [1] * len(found.cases[0].builds)


def test_two_lines_that_wait_are_two_waits():
    class TwoLines(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            first = metadata.seq_lens[0].item()
            return first + metadata.seq_lens[1].item()

    assert {len(build.waits) for build in checked(TwoLines, "decode").cases[0].builds} == {2}
