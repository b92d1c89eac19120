"""Tokens, positions, lengths and slots written on the device: kernel and reference against a model in plain Python."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import compare_on_a_gpu_or_interpreted

from vllm_async_spec.kernels import (
    ROW_FIELDS,
    LastStep,
    PagedGroup,
    StepInputs,
    correct_inputs,
    correct_inputs_reference,
)
from vllm_async_spec.kernels.triton_kernels import kernels_of
from vllm_async_spec.streams import refuse_waits

ROWS, TOKENS, WIDTH, DRAFTS = 40, 400, 24, 17
UNWRITTEN = -99
PAGES = [(16,), (16, 32), (48, 16, 32)]


@dataclass
class Row:
    """A row of a step, and what the last step did to its request."""

    query: int
    computed: int  # as the host assumes
    came_from: int = -1
    began: int = 0  # the carry of the row that it came from
    count: int = 1
    sampled_from: int = -1  # as `came_from`, and also where there were no drafts
    drafts: int = 0  # of this step

    @property
    def exact(self) -> int:
        return self.computed if self.came_from < 0 else min(self.began + self.count, self.computed)


def random_rows(choose: random.Random, batch: int) -> list[Row]:
    rows = []
    for place in choose.sample(range(batch + 3), batch):
        drafts = choose.randrange(1, DRAFTS + 1)
        began = choose.choice([0, 15, 16, 17, 31, 32, 60, 120]) + choose.randrange(4)
        if choose.random() < 0.4:
            query, sampled_from = choose.choice([1, 5, 33]), choose.choice([-1, place])
            verifies = choose.randrange(min(query, DRAFTS + 1))
            rows.append(Row(query, choose.randrange(200), sampled_from=sampled_from, drafts=verifies))
        else:
            assumed = max(0, began + drafts + 1 - choose.choice([0, 0, 9]))
            query, count = choose.randrange(1, DRAFTS + 2), choose.randrange(1, drafts + 2)
            rows.append(Row(query, assumed, place, began, count, place, choose.randrange(query)))
    return rows


@dataclass
class Given:
    last: LastStep
    rows: torch.Tensor
    batch: int
    next_carry: torch.Tensor
    sent: StepInputs

    def correct(self, how: Callable[..., None] = correct_inputs) -> None:
        how(self.last, self.rows, self.batch, self.next_carry, self.sent)


def tensors(rows: list[Row], pages: tuple[int, ...], axes: int, device: str = "cpu") -> Given:
    queries = [row.query for row in rows]
    starts = [sum(queries[:row]) for row in range(len(rows) + 1)]
    carry, counts = torch.full((ROWS,), 7777, dtype=torch.int32), torch.zeros(len(rows) + 3, dtype=torch.int32)
    for row in rows:
        if row.came_from >= 0:
            carry[row.came_from], counts[row.came_from] = row.began, row.count
    positions = torch.full((TOKENS,), UNWRITTEN)
    sent = torch.cat([row.computed + torch.arange(row.query) for row in rows])
    positions[: len(sent)] = sent
    lengths = torch.zeros(ROWS, dtype=torch.int32)
    lengths[: len(rows)] = torch.tensor([row.computed + row.query for row in rows])
    groups = []
    for number, page in enumerate(pages):
        table = torch.arange(ROWS * WIDTH, dtype=torch.int32).flip(0).view(ROWS, WIDTH) + 1000 * number
        groups.append(PagedGroup(table.to(device), page, torch.full((TOKENS,), UNWRITTEN, device=device)))
        for row, request in enumerate(rows):
            for token in range(request.query):
                groups[-1].slot_mapping[starts[row] + token] = slot(groups[-1], row, request.computed + token)
    # Three axes of M-RoPE, each further ahead of the text's; one column more than tokens, as vLLM has it.
    rope = (positions + 10 * torch.arange(axes)[:, None]).new_empty(axes, TOKENS + 1)[:, :TOKENS]
    rope.copy_(positions + 10 * torch.arange(axes)[:, None])
    drafts = torch.tensor([row.drafts for row in rows])
    fields = [
        torch.tensor([row.came_from for row in rows]),
        torch.tensor([row.sampled_from for row in rows]),
        torch.tensor([row.computed for row in rows]),
        drafts,
        drafts.cumsum(0),
    ]
    staged = torch.zeros(ROW_FIELDS, ROWS, dtype=torch.int32)  # wider than the batch, as the runner's
    staged[:, : len(rows)] = torch.stack(fields)
    drafted = torch.stack([torch.arange(DRAFTS) + 9000 + 100 * row for row in range(len(counts))])
    return Given(
        LastStep(
            carry.to(device),
            counts.to(device),
            (torch.arange(len(counts), dtype=torch.int32)[:, None] + torch.tensor([5000, 0])).int().to(device),
            drafted.to(device),
        ),
        staged.to(device),
        len(rows),
        torch.full((ROWS,), UNWRITTEN, dtype=torch.int32, device=device),
        StepInputs(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            input_ids=torch.arange(TOKENS, dtype=torch.int32, device=device),
            verified=torch.full((TOKENS,), UNWRITTEN, dtype=torch.int32, device=device),
            positions=positions.to(device),
            seq_lens=lengths.to(device),
            axes=rope.to(device) if axes else None,
            paged=groups,
        ),
    )


def test_addresses_are_made_on_the_host_whatever_pytorchs_default_device_is():
    row = torch.zeros(2, dtype=torch.int32)
    sent = StepInputs(row, row, row, row.long(), row, axes=None, paged=())
    with torch.device("meta"):
        assert sent.addresses[0] == row.data_ptr()


def slot(group: PagedGroup, row: int, position: int) -> int:
    return int(group.block_table[row, position // group.page_size]) * group.page_size + position % group.page_size


def check(rows: list[Row], given: Given) -> None:
    batch, start, sent = len(rows), 0, given.sent
    assert given.next_carry.tolist() == [row.exact for row in rows] + [UNWRITTEN] * (ROWS - batch)
    assert sent.seq_lens.tolist() == [row.exact + row.query for row in rows] + [0] * (ROWS - batch)
    input_ids, verified = list(range(TOKENS)), []
    for number, row in enumerate(rows):
        for token in range(row.query):
            at, position = start + token, row.exact + token
            assert int(sent.positions[at]) == position
            for group in sent.paged:
                assert int(group.slot_mapping[at]) == slot(group, number, position), (number, token, group.page_size)
            if sent.axes is not None:
                assert sent.axes[:, at].tolist() == [position + 10 * axis for axis in range(len(sent.axes))]
        start += row.query
        if row.sampled_from >= 0:
            drafts = [9000 + 100 * row.sampled_from + draft for draft in range(row.drafts)]
            input_ids[start - row.drafts - 1 : start] = [5000 + row.sampled_from, *drafts]
        verified += input_ids[start - row.drafts : start]
    assert sent.input_ids.tolist() == input_ids
    assert sent.verified.tolist() == verified + [UNWRITTEN] * (TOKENS - len(verified))
    for tensor in (sent.positions, *(group.slot_mapping for group in sent.paged)):
        assert (tensor[start:] == UNWRITTEN).all()


@given(st.randoms(), st.integers(1, 9), st.sampled_from(PAGES), st.sampled_from([0, 3]))
def test_the_reference_is_the_model(choose: random.Random, batch: int, pages: tuple[int, ...], axes: int):
    rows = random_rows(choose, batch)
    arguments = tensors(rows, pages, axes)
    arguments.correct(correct_inputs_reference)
    check(rows, arguments)


def test_rows_that_had_no_draft_are_left_as_they_were_sent():
    rows = [Row(5, 32), Row(1, 47)]
    arguments = tensors(rows, (16,), 0)
    arguments.sent.seq_lens.add_(1)
    arguments.correct()
    assert arguments.sent.seq_lens[:2].tolist() == [38, 49]
    assert arguments.next_carry[:2].tolist() == [32, 47]


def test_a_step_after_no_step_needs_no_counts():
    arguments = tensors([Row(5, 0)], (16,), 0)
    arguments.last = dataclasses.replace(arguments.last, counts=arguments.last.counts[:0])
    arguments.correct(correct_inputs_reference)
    check([Row(5, 0)], arguments)


def test_drafts_may_be_one_zero_for_all():
    check_one_zero(correct_inputs_reference, "cpu")


def check_one_zero(how: Callable[..., None], device: str) -> None:
    rows = [Row(4, 36, 1, 32, 2, 1, 3), Row(1, 9)]
    arguments = tensors(rows, (16,), 0, device)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(5, 3)
    arguments.last = dataclasses.replace(arguments.last, drafts=zero)
    arguments.correct(how)
    assert arguments.sent.input_ids[:5].tolist() == [5001, 0, 0, 0, 4]
    assert arguments.sent.verified[:4].tolist() == [0, 0, 0, UNWRITTEN]


def test_the_kernel_is_the_model():
    compare_on_a_gpu_or_interpreted(compare_kernel)


def compare_kernel(device: str) -> None:
    if device == "cpu":
        kernel = kernels_of("vllm_async_spec.kernels.device_inputs").correct_inputs
        assert type(kernel).__name__ == "InterpretedFunction"
    check_one_zero(correct_inputs, device)
    choose = random.Random(7)
    for pages in PAGES:
        for batch, axes in [(1, 0), (4, 3), (9, 0)]:
            rows = random_rows(choose, batch)
            arguments = tensors(rows, pages, axes, device)
            arguments.correct()
            check(rows, arguments)


@pytest.mark.gpu
def test_correcting_waits_for_nothing_on_a_gpu():
    arguments = tensors(random_rows(random.Random(3), 9), (16, 32), 3, "cuda")
    arguments.correct()  # compiles
    refuse_waits(arguments.correct)
