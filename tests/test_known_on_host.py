"""A device tensor whose reads are answered by the host; the values differ on purpose, to show who answers."""

import torch

from vllm_async_spec.known_on_host import known_on_host


def test_reads_are_the_hosts_and_computation_is_the_devices():
    lengths = torch.tensor([3, 5])
    bound = torch.tensor([4, 6])
    known = known_on_host(lengths, bound)
    assert known.cpu() is bound
    assert known_on_host(lengths[1], bound[1]).item() == 6
    computed = known + 1
    assert type(computed) is torch.Tensor
    assert computed.tolist() == [4, 6]
    known[0] = 9
    assert lengths.tolist() == [9, 5]
