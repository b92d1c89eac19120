"""Each rank's part of a sequence, as vLLM's arithmetic has it, from the device's lengths alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_async_spec.patching import temporarily
from vllm_async_spec.sync_policy import sync_policy
from vllm_async_spec.vllm_plugin.patches import context_parallel_lengths
from vllm_async_spec.vllm_plugin.patches.context_parallel_lengths import LocalLengths

LENGTHS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 131072, 0, 0]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def buffer(device: str = "cpu") -> Any:
    cpu = torch.full((len(LENGTHS),), 7, dtype=torch.int32)
    return SimpleNamespace(cpu=cpu, gpu=cpu.to(device, copy=True), np=cpu.numpy())


def by_hand(length: int, ranks: int, rank: int, interleave: int) -> int:
    return sum(position // interleave % ranks == rank for position in range(length))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_divide_the_tokens(ranks: int, interleave: int, device: str):
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    for rank in range(ranks):
        local = LocalLengths(buffer(device), lengths, ranks, rank, interleave)
        with sync_policy("error"):
            local.copy_to_gpu()
        assert local.gpu.tolist() == [by_hand(length, ranks, rank, interleave) for length in LENGTHS]
    assert lengths.tolist() == LENGTHS


def test_only_the_batchs_requests_are_written_and_the_host_keeps_its_bound():
    given = buffer()
    local = LocalLengths(given, torch.tensor(LENGTHS, dtype=torch.int32), 2, 0, 1)
    assert local.copy_to_gpu(4).tolist() == [0, 1, 1, 8]
    assert given.gpu.tolist() == [0, 1, 1, 8] + [7] * 12
    assert given.cpu.tolist() == [7] * 16
    assert (local.cpu, local.gpu, local.np) == (given.cpu, given.gpu, given.np)


class Runner:
    """What vLLM's runner does with the buffer."""

    def __init__(self, *, ranks: int = 2, asynchronous: bool = True) -> None:
        self.use_async_spec_decode = asynchronous
        self.dcp_world_size = ranks
        self.dcp_rank = 0
        self.parallel_config = SimpleNamespace(cp_kv_cache_interleave_size=1)
        self.seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
        if ranks > 1:
            self.dcp_local_seq_lens = buffer()

    def _build_attention_metadata(self, num_tokens: int) -> int:
        return num_tokens


def test_a_runner_of_several_ranks_gets_its_buffer_once():
    with temporarily() as transaction:
        module: Any = SimpleNamespace(GPUModelRunner=Runner)
        context_parallel_lengths._apply(transaction, module)
        runner = Runner()
        assert runner._build_attention_metadata(3) == 3
        made = runner.dcp_local_seq_lens
        assert isinstance(made, LocalLengths)
        runner._build_attention_metadata(3)
        assert runner.dcp_local_seq_lens is made
        exact = Runner(asynchronous=False)
        exact._build_attention_metadata(3)
        assert not isinstance(exact.dcp_local_seq_lens, LocalLengths)
        alone = Runner(ranks=1)
        assert alone._build_attention_metadata(3) == 3
