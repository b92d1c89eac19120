"""Positions, lengths and slots corrected on the device: kernel and reference against a model in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import compare_on_a_gpu_or_interpreted

from vllm_async_spec.kernels import PagedGroup, PagedGroups, correct_positions, correct_positions_reference
from vllm_async_spec.kernels.triton_kernels import kernels_of

ROWS, TOKENS, WIDTH = 40, 400, 24
UNWRITTEN = -99


@dataclass
class Row:
    """A row of a step, and what the last step did to its request."""

    query: int
    computed: int  # as the host assumes
    came_from: int = -1
    began: int = 0  # the carry of the row that it came from
    count: int = 1

    @property
    def exact(self) -> int:
        return self.computed if self.came_from < 0 else min(self.began + self.count, self.computed)


@st.composite
def steps(draw: Any) -> list[Row]:
    """Prefills, decodes and drafts; rows moved; rejections 0..K; lengths around a page's end; tokens taken back."""
    size = draw(st.integers(1, 9))
    places = draw(st.permutations(range(size + 3)))
    rows = []
    for place in places[:size]:
        if draw(st.booleans()):
            rows.append(Row(draw(st.sampled_from([1, 5, 33])), draw(st.integers(0, 200))))
            continue
        drafts = draw(st.integers(1, 17))
        began = draw(st.sampled_from([0, 15, 16, 17, 31, 32, 60, 120])) + draw(st.integers(0, 3))
        taken_back = draw(st.sampled_from([0, 0, 0, 9]))
        assumed = max(0, began + drafts + 1 - taken_back)
        query = draw(st.integers(1, 18))
        rows.append(Row(query, assumed, place, began, draw(st.integers(1, drafts + 1))))
    return rows


def tensors(rows: list[Row], pages: tuple[int, ...], axes: int, device: str = "cpu") -> dict[str, Any]:
    """The arguments of `correct_positions`, with what the host has sent in them."""
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
    ints = {
        "carry": carry,
        "counts": counts,
        "previous": torch.tensor([row.came_from for row in rows]),
        "computed": torch.tensor([row.computed for row in rows]),
        "query_start_loc": torch.tensor(starts),
        "next_carry": torch.full((ROWS,), UNWRITTEN),
        "seq_lens": lengths,
    }
    # Three axes of M-RoPE, each further ahead of the text's; one column more than tokens, as vLLM has it.
    rope = (positions + 10 * torch.arange(axes)[:, None]).new_empty(axes, TOKENS + 1)[:, :TOKENS]
    rope.copy_(positions + 10 * torch.arange(axes)[:, None])
    made = {name: tensor.int().to(device) for name, tensor in ints.items()}
    axes_given = rope.to(device) if axes else None
    return made | {"positions": positions.to(device), "axes": axes_given, "paged": PagedGroups(groups)}


def slot(group: PagedGroup, row: int, position: int) -> int:
    return int(group.block_table[row, position // group.page_size]) * group.page_size + position % group.page_size


def check(rows: list[Row], given: dict[str, Any]) -> None:
    """Every value, one token at a time, from the exact number of computed tokens."""
    batch, start = len(rows), 0
    assert given["next_carry"].tolist() == [row.exact for row in rows] + [UNWRITTEN] * (ROWS - batch)
    assert given["seq_lens"].tolist() == [row.exact + row.query for row in rows] + [0] * (ROWS - batch)
    for number, row in enumerate(rows):
        for token in range(row.query):
            at, position = start + token, row.exact + token
            assert int(given["positions"][at]) == position
            for group in given["paged"].groups:
                assert int(group.slot_mapping[at]) == slot(group, number, position), (number, token, group.page_size)
            if given["axes"] is not None:
                assert given["axes"][:, at].tolist() == [position + 10 * axis for axis in range(len(given["axes"]))]
        start += row.query
    for tensor in (given["positions"], *(group.slot_mapping for group in given["paged"].groups)):
        assert (tensor[start:] == UNWRITTEN).all()


@given(steps(), st.sampled_from([(16,), (16, 32), (48, 16, 32)]), st.sampled_from([0, 3]))
def test_the_reference_is_the_model(rows: list[Row], pages: tuple[int, ...], axes: int) -> None:
    arguments = tensors(rows, pages, axes)
    correct_positions_reference(**arguments)
    check(rows, arguments)


def test_rows_that_had_no_draft_are_left_as_they_were_sent() -> None:
    rows = [Row(5, 32), Row(1, 47)]
    arguments = tensors(rows, (16,), 0)
    arguments["seq_lens"] += 1
    correct_positions(**arguments)
    assert arguments["seq_lens"][:2].tolist() == [38, 49]
    assert arguments["next_carry"][:2].tolist() == [32, 47]


def test_a_step_after_no_step_needs_no_counts() -> None:
    arguments = tensors([Row(5, 0)], (16,), 0)
    arguments["counts"] = arguments["counts"][:0]
    correct_positions_reference(**arguments)
    check([Row(5, 0)], arguments)


def test_the_kernel_is_the_model() -> None:
    compare_on_a_gpu_or_interpreted(compare_kernel)


def random_rows(choose: random.Random, batch: int) -> list[Row]:
    """As `steps`."""
    places = choose.sample(range(batch + 3), batch)
    rows = []
    for place in places:
        drafts, began = choose.randrange(1, 18), choose.choice([0, 15, 16, 31, 32, 60, 120]) + choose.randrange(4)
        if choose.random() < 0.3:
            rows.append(Row(choose.choice([1, 5, 33]), choose.randrange(200)))
        else:
            assumed = max(0, began + drafts + 1 - choose.choice([0, 0, 9]))
            rows.append(Row(choose.randrange(1, 19), assumed, place, began, choose.randrange(1, drafts + 2)))
    return rows


def compare_kernel(device: str) -> None:
    if device == "cpu":
        assert (
            kernels_of("vllm_async_spec.kernels.device_positions").correct_positions.__class__.__name__
            == "InterpretedFunction"
        )
    choose = random.Random(7)
    for pages in [(16,), (16, 32), (48, 16, 32)]:
        for batch, axes in [(1, 0), (4, 3), (9, 0)]:
            rows = random_rows(choose, batch)
            arguments = tensors(rows, pages, axes, device)
            correct_positions(**arguments)
            check(rows, arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_correcting_waits_for_nothing_on_a_gpu() -> None:
    arguments = tensors(random_rows(random.Random(3), 9), (16, 32), 3, "cuda")
    correct_positions(**arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        correct_positions(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
