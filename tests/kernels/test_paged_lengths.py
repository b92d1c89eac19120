"""The kernels that put exact lengths into FlashInfer's plans, against their references."""

import itertools

import torch
from interpreted import compare_on_a_gpu_or_interpreted
from torch.nn.functional import pad

from vllm_async_spec.kernels import (
    set_chunks,
    set_chunks_reference,
    set_last_page_lens,
    set_last_page_lens_reference,
    set_pages,
    set_pages_reference,
    set_work_lens,
    set_work_lens_reference,
)
from vllm_async_spec.kernels.triton_kernels import kernels_of

PAGE = 16


def test_the_kernels_equal_their_references():
    compare_on_a_gpu_or_interpreted(compare_kernels)


def compare_kernels(device: str) -> None:
    if device == "cpu":
        kernel = kernels_of("vllm_async_spec.kernels.paged_lengths").work_lens
        assert type(kernel).__name__ == "InterpretedFunction"
    for batch in (1, 7, 256, 300):
        compare_last_page_lens(batch, device)
    for batch, width in ((1, 1), (7, 40), (64, 600)):
        compare_pages(batch, width, device)
    for works in (1, 5, 256, 700):
        compare_work_lens(works, device)
    for batch, tokens, kept in itertools.product((1, 7, 64), (1, 4, 300), (False, True)):
        compare_chunks(batch, tokens, kept, device)


def compare_last_page_lens(batch: int, device: str) -> None:
    generator = torch.Generator().manual_seed(batch)
    exact = torch.randint(0, 200, (batch,), generator=generator, dtype=torch.int32)
    bound = exact + torch.randint(0, 40, (batch,), generator=generator, dtype=torch.int32) * (exact > 0)
    indptr = pad(-(-bound // PAGE), (1, 0)).cumsum(0, dtype=torch.int32)
    expected = torch.empty_like(exact)
    set_last_page_lens_reference(exact, indptr, PAGE, expected)
    pages = indptr.diff()
    assert torch.equal(torch.where(pages > 0, (pages - 1) * PAGE + expected, 0), exact)
    got = torch.full_like(exact, -99).to(device)
    set_last_page_lens(exact.to(device), indptr.to(device), PAGE, got)
    assert torch.equal(got.cpu(), expected)


def compare_pages(batch: int, width: int, device: str) -> None:
    generator = torch.Generator().manual_seed(batch)
    bound = torch.randint(0, width * PAGE + 1, (batch,), generator=generator, dtype=torch.int32)
    exact = (bound - torch.randint(0, 40, (batch,), generator=generator, dtype=torch.int32)).clamp(min=0)
    indptr = pad(-(-bound // PAGE), (1, 0)).cumsum(0, dtype=torch.int32)
    table = torch.randint(0, 10_000, (batch + 3, width + 5), generator=generator, dtype=torch.int32)[:, :width]

    def outputs() -> list[torch.Tensor]:
        return [torch.full((int(indptr[-1]) + 9,), -99).int(), torch.full((batch,), -99).int()]

    expected = outputs()
    set_pages_reference(exact, table, indptr, PAGE, *expected)
    rows = [table[row, : -(-int(bound[row]) // PAGE)].tolist() for row in range(batch)]
    assert expected[0].tolist() == [page for row in rows for page in row] + [-99] * 9
    last = torch.empty_like(exact)
    set_last_page_lens_reference(exact, indptr, PAGE, last)
    assert torch.equal(expected[1], last)
    got = [each.to(device) for each in outputs()]
    on_device = pad(table, (0, 5)).to(device)[:, :width]
    set_pages(exact.to(device), on_device, indptr.to(device), PAGE, *got)
    assert [each.tolist() for each in got] == [each.tolist() for each in expected]


def compare_work_lens(works: int, device: str) -> None:
    generator = torch.Generator().manual_seed(works)
    exact = torch.randint(1, 200, (9,), generator=generator, dtype=torch.int32)
    requests = torch.randint(0, 9, (works + 3,), generator=generator, dtype=torch.int32)
    requests[works:] = 1_000_000  # padding, which must not be read as a request
    count = torch.tensor([works], dtype=torch.int32)
    expected = torch.full((works + 3,), -99, dtype=torch.int32)
    set_work_lens_reference(exact, requests, count, expected)
    assert expected.tolist() == [*(int(exact[at]) for at in requests[:works]), -99, -99, -99]
    got = torch.full_like(expected, -99).to(device)
    set_work_lens(exact.to(device), requests.to(device), count.to(device), got)
    assert torch.equal(got.cpu(), expected)


def compare_chunks(batch: int, tokens: int, kept: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(batch + tokens)
    exact = torch.randint(0, 200, (batch,), generator=generator, dtype=torch.int32)
    query_lens = torch.randint(0, tokens + 1, (batch,), generator=generator)
    starts = pad(query_lens, (1, 0)).cumsum(0).int()
    size, limit = torch.tensor([32], dtype=torch.int32), 150
    counts = -(-exact.clamp(1, limit) // 32)
    # Two more pieces of work than each has chunks, and two behind them that are none.
    planned = [(request, chunk) for request, count in enumerate(counts.tolist()) for chunk in range(count + 2)]
    requests, chunks = torch.tensor([*planned, (1_000_000, 9), (-5, 9)], dtype=torch.int32).T.contiguous()

    def outputs() -> list[torch.Tensor]:
        # What an earlier step made of the chunks is written over, but for what is no piece of work.
        left = torch.where((requests >= 0) & (requests < batch), 0, chunks) if kept else chunks.clone()
        return [
            chunks if kept else left,
            left,
            torch.full((batch + 1,), -9).int(),
            torch.full((int(starts[-1]) + 4,), -9).int(),
        ]

    expected = outputs()
    set_chunks_reference(exact, starts, limit, size, requests, *expected)
    planned_chunks, expected = expected[0], expected[1:]
    assert [(r, c) for r, c in zip(requests.tolist(), expected[0].tolist(), strict=True)][:-2] == [
        (request, min(chunk, int(counts[request]) - 1)) for request, chunk in planned
    ]
    assert expected[0][-2:].tolist() == [9, 9]
    assert not kept or torch.equal(planned_chunks, chunks), "the plan is not kept"
    assert expected[1].diff().tolist() == (counts * query_lens).tolist()
    by_token = [int(count) for count, times in zip(counts, query_lens, strict=True) for _ in range(times)]
    assert expected[2].diff()[: len(by_token)].tolist() == by_token
    assert expected[2][-3:].tolist() == [-9] * 3
    given = outputs()
    got = [each.to(device) for each in given[1:]]
    source = given[0].to(device) if kept else got[0]
    set_chunks(exact.to(device), starts.to(device), limit, size.to(device), requests.to(device), source, *got)
    assert [each.tolist() for each in got] == [each.tolist() for each in expected]
    assert not kept or torch.equal(source.cpu(), chunks)
