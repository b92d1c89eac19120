"""Chunked local attention cut into virtual batches: the kernels against a second statement of such attention."""

import itertools
import random

import pytest
import torch
from interpreted import compare_on_a_gpu_or_interpreted
from torch.nn.functional import pad

from vllm_async_spec.kernels import (
    gather_pages,
    gather_pages_reference,
    split_by_chunks,
    split_by_chunks_reference,
    virtual_batches,
)
from vllm_async_spec.kernels.triton_kernels import kernels_of
from vllm_async_spec.streams import refuse_waits

PAGE = 16


def random_batch(seed: int, chunk: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    choose = random.Random(seed)
    query, lengths = [], []
    for row in range(batch):
        tokens = choose.choice([1, 1, 4, 3, chunk, chunk + 1, choose.randrange(1, 4 * chunk)])
        around = choose.choice([chunk, PAGE]) * choose.randrange(5) + choose.choice([-1, 0, 1])
        lengths.append(max(tokens, choose.choice([around, around + tokens, tokens])))
        query.append(tokens)
        if batch > 2 and row >= batch - 2:
            query[-1] = lengths[-1] = 0
    return pad(torch.tensor(query).cumsum(0), (1, 0)).int(), torch.tensor(lengths).int()


def rows_of(starts: torch.Tensor, lengths: torch.Tensor, chunk: int) -> list[tuple[int, int, int, int]]:
    """Every virtual batch that has query tokens: first query token, keys, request, chunk; one token at a time."""
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    for request, length in enumerate(lengths.tolist()):
        first, end = starts[request : request + 2].tolist()
        for token in range(first, end):
            position = length - end + token
            begun, _ = rows.get((request, position // chunk), (token, 0))
            rows[request, position // chunk] = (begun, position % chunk + 1)
    return [(begun, keys, *at) for at, (begun, keys) in rows.items()]


def split(how, starts: torch.Tensor, lengths: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    count = int(virtual_batches(starts.cpu().diff(), chunk).sum())
    out = [torch.full((count + extra,), -99, dtype=torch.int32, device=lengths.device) for extra in (1, 0, 0, 0)]
    how(starts, lengths, chunk, *out)
    return out


@pytest.mark.parametrize("chunk", [16, 48, 64])
@pytest.mark.parametrize("batch", [1, 3, 150])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_the_chunks_that_query_tokens_lie_in(seed: int, batch: int, chunk: int):
    starts, lengths = random_batch(seed, chunk, batch)
    virtual_starts, keys, requests, chunks = split(split_by_chunks_reference, starts, lengths, chunk)
    tokens = virtual_starts.diff()
    assert (tokens >= 0).all()
    assert virtual_starts[0] == 0
    assert virtual_starts[-1] == starts[-1]
    real = tokens > 0
    got = zip(*(column[real].tolist() for column in (virtual_starts[:-1], keys, requests, chunks)), strict=True)
    assert list(got) == rows_of(starts, lengths, chunk)
    assert keys[~real].eq(0).all()
    if tokens.max() == 1:
        assert len(tokens) == batch


def test_one_row_for_each_request_of_one_token_and_at_most_one_too_many_for_the_others():
    assert virtual_batches(torch.tensor([0, 1, 2, 9, 10, 17, 18]), 8).tolist() == [1, 1, 2, 2, 3, 3, 4]
    assert virtual_batches(torch.tensor([0, 1, 2, 3]), 1).tolist() == [1, 1, 2, 3]


def test_the_kernels_equal_their_references():
    compare_on_a_gpu_or_interpreted(compare_kernels)


def compare_kernels(device: str) -> None:
    if device == "cpu":
        kernel = kernels_of("vllm_async_spec.kernels.virtual_batches").split_by_chunks
        assert type(kernel).__name__ == "InterpretedFunction"
    for batch, chunk in itertools.product([1, 3, 150], [16, 48]):
        starts, lengths = random_batch(batch, chunk, batch)
        lengths[0] = 0 if batch == 3 else lengths[0]  # as a row of padding that is shorter than its query
        expected = split(split_by_chunks_reference, starts, lengths, chunk)
        got = split(split_by_chunks, starts.to(device), lengths.to(device), chunk)
        assert [column.tolist() for column in got] == [column.tolist() for column in expected], (batch, chunk)
        width = 1 + int(lengths.max()) // PAGE
        table = torch.randperm(batch * (width + 3), dtype=torch.int32).view(batch, -1)
        pages = gather_pages(table.to(device)[:, :width], got[2], got[3], chunk // PAGE)
        known = gather_pages_reference(table[:, :width], expected[2], expected[3], chunk // PAGE)
        assert pages.tolist() == known.tolist(), (batch, chunk)


@pytest.mark.gpu
def test_cutting_waits_for_nothing_on_a_gpu():
    starts, lengths = random_batch(5, 64, 33)
    table = torch.zeros(33, 40, dtype=torch.int32, device="cuda")
    on_device = starts.cuda(), lengths.cuda()
    count = int(virtual_batches(starts.diff(), 64).sum())
    out = [torch.empty(count + extra, dtype=torch.int32, device="cuda") for extra in (1, 0, 0, 0)]

    def cut() -> None:
        split_by_chunks(*on_device, 64, *out)
        gather_pages(table, out[2], out[3], 4)

    cut()  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    asleep = torch.cuda.Event()
    asleep.record()
    refuse_waits(cut)
    assert not asleep.query(), "the host has waited for the device"
