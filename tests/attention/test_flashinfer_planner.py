"""Plans for CUDA graphs by FlashInfer's own planner, compiled for the host: no GPU. `make test-planner` fetches it."""

from __future__ import annotations

import functools
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.attention.flashinfer import (
    keep_plan,
    keys_are_split,
    planned_requests,
    split_bytes,
    with_empty_requests,
    write_exact_lengths,
)

HERE = Path(__file__).parent / "planner"
FETCHED = Path(os.environ.get("PLANNER", ".cache/planner"))
RELEASES = ("0.6.8.post1", "0.6.14", "0.7.0.post1", "0.7.2.post1")
"""FlashInfer's, beside vLLM 0.20, 0.26, 0.32 and 0.33."""
HEADS = ((32, 8), (64, 8), (28, 4), (32, 32), (8, 1), (32, 2))
HEAD_SIZE, PAGE, PROCESSORS = 128, 16, 132

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Graph:
    """Drafts of so many requests, and what the wrapper hands to the planner for them."""

    requests: int
    tokens: int
    heads: tuple[int, int]
    planned: int

    @property
    def room(self) -> int:
        return split_bytes(self.planned, self.requests, self.tokens, *self.heads, HEAD_SIZE, torch.device("cpu"))

    @property
    def split(self) -> bool:
        return keys_are_split(self.requests, self.tokens, *self.heads, torch.device("cpu"))

    def wrapper(self, planner: Planner, lengths: list[int], missing: int = 0) -> Any:
        """Planned for live requests of these lengths, with `missing` bytes fewer than are counted."""
        live = len(lengths)
        starts = torch.arange(self.requests + 1, dtype=torch.int32).clamp(max=live) * self.tokens
        pages = torch.tensor([-(-length // PAGE) for length in lengths] + [0] * (self.requests - live))
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        last = torch.zeros(self.planned, dtype=torch.int32)
        shape = (*self.heads, HEAD_SIZE, PAGE, self.requests * self.tokens, self.room - missing)
        wrapper = with_empty_requests(Handed)(paged_kv_last_page_len_buf=last, plan=functools.partial(planner, *shape))
        heads = dict(zip(("num_qo_heads", "num_kv_heads"), self.heads, strict=True))
        last = torch.ones(self.requests, dtype=torch.int32)
        wrapper.plan(starts, indptr, torch.zeros(0), last, page_size=PAGE, **heads)
        assert wrapper._qo_indptr_buf.diff().tolist()[: self.requests] == starts.diff().tolist()
        return wrapper

    def plan(self, planner: Planner, lengths: list[int], missing: int = 0) -> Plan:
        planned: Plan = self.wrapper(planner, lengths, missing).planned
        return planned


class Handed:
    _backend, _window_left = "fa2", -1

    def __init__(self, paged_kv_last_page_len_buf: torch.Tensor, plan: Callable[..., Plan]) -> None:
        self._paged_kv_last_page_len_buf, self._planner = paged_kv_last_page_len_buf, plan

    def plan(self, **given: Any) -> None:
        self._qo_indptr_buf, self._paged_kv_indptr_buf = (
            given[name].clone() for name in ("qo_indptr", "paged_kv_indptr")
        )
        starts, pages = self._qo_indptr_buf, self._paged_kv_indptr_buf
        whole = given.get("disable_split_kv", False)
        self.planned = self._planner(int(whole), len(starts) - 1, *starts.tolist(), *pages.tolist())
        self._max_q_len, self._plan_info = int(starts.diff().max()), self.planned.numbers
        self._int_workspace_buffer = self.planned.ints.view(torch.uint8)


@dataclass(frozen=True)
class Plan:
    numbers: list[int]
    works: list[tuple[int, int]]
    """The request and the chunk of each piece of work that runs, if so many are launched as the planner says."""
    chunk: int
    ints: torch.Tensor
    """What is copied to the device."""

    @property
    def tile(self) -> int:
        return self.numbers[3]


Planner = Callable[..., Plan]

BY_ROW = "max_partial_rows"
"""In planners that count the partial outputs by query token, and not by row of a tile: from 0.7.2 on."""


@pytest.fixture(scope="module", params=RELEASES)
def planner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planner:
    cuda, source = FETCHED / "cuda/nvidia/cu13", FETCHED / request.param / "flashinfer/data/include"
    if not (cuda / "bin/nvcc").is_file() or not source.is_dir():
        pytest.skip(f"{FETCHED} has no nvcc or no FlashInfer {request.param}; `make test-planner` fetches them")
    built = tmp_path_factory.mktemp("planner")
    (built / "libcudart.so").symlink_to(next((cuda / "lib").glob("libcudart.so.*")).resolve())
    scheduler = (source / "flashinfer/attention/scheduler.cuh").read_text()
    options = ["-DUNIFORM_Q_LEN"] if "uniform_q_len" in scheduler else []
    options += [f"-I{folder}" for folder in (source, cuda / "include", cuda / "include/cccl")]
    compiler = [cuda / "bin/nvcc", "-std=c++17", "-arch=sm_90", "-cudart=shared", f"-L{built}", *options]
    subprocess.run([*compiler, "-o", built / "plan", HERE / "plan.cu"], check=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built / "gpu.so", HERE / "gpu.c"], check=True)
    found = {"LD_PRELOAD": str(built / "gpu.so"), "LD_LIBRARY_PATH": str((cuda / "lib").resolve())}

    def plan(*numbers: int) -> Plan:
        written = built / "ints"
        given = " ".join(map(str, numbers))
        done = subprocess.run(
            [built / "plan", written], input=given, env=os.environ | found, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        info, requests, chunks, size = ([int(word) for word in part.split()] for part in done.stdout.split("|"))
        ints = torch.frombuffer(bytearray(written.read_bytes()), dtype=torch.int32)
        return Plan(info, list(zip(requests, chunks, strict=True)), *size, ints)

    plan.by_row = BY_ROW in scheduler  # type: ignore[attr-defined]
    return plan


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_processors", lambda device: PROCESSORS)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    requests, tokens, heads = draw(st.integers(1, 96)), draw(st.integers(2, 9)), draw(st.sampled_from(HEADS))
    return Graph(requests, tokens, heads, planned_requests(requests, tokens, heads[0] // heads[1]))


@settings(max_examples=60)
@given(graph=graphs(), data=st.data())
def test_pieces_of_work_are_no_larger_than_a_request_and_every_plan_has_one_form(
    planner: Planner, graph: Graph, data: st.DataObject
):
    rows = graph.tokens * graph.heads[0] // graph.heads[1]
    captured = graph.wrapper(planner, [graph.tokens] * graph.requests)
    assert captured.planned.tile == (16 if rows <= 16 else 64 if rows <= 64 else 128)
    lengths = data.draw(st.lists(st.integers(graph.tokens, 40_000), min_size=1, max_size=graph.requests))
    later = graph.wrapper(planner, lengths)
    assert later._plan_info == captured._plan_info, "the graph's kernels were launched for another plan"
    works, launched = later.planned.works, later._plan_info[0]
    tiles, expected = -(-rows // later.planned.tile), list[tuple[int, int]]()
    if graph.split:
        for request, length in enumerate(lengths):
            chunks = math.ceil(math.ceil(length / PAGE) * PAGE / later.planned.chunk)
            expected += [(request, chunk) for _ in range(tiles) for chunk in range(chunks)]
        assert works == expected
    else:
        assert works[:launched] == [(request, 0) for request in range(graph.requests) for _ in range(tiles)]


@settings(max_examples=60)
@given(graph=graphs(), empty=st.booleans())
def test_the_room_that_is_counted_is_what_it_takes(planner: Planner, graph: Graph, empty: bool):
    chosen = graph if empty else Graph(graph.requests, graph.tokens, graph.heads, graph.requests)
    lengths = [5000] * graph.requests
    chosen.plan(planner, lengths)
    if not chosen.split:
        return
    surplus = 0
    if planner.by_row:  # type: ignore[attr-defined]
        heads, kv_heads = graph.heads
        each = 4 * heads * (HEAD_SIZE + 1)
        surplus = chosen.room - each * -(-chosen.room // each // (heads // kv_heads))
    with pytest.raises(RuntimeError, match="Buffer overflow"):
        chosen.plan(planner, lengths, missing=surplus + 16)


@settings(max_examples=60)
@given(graph=graphs(), data=st.data())
def test_keys_stay_whole_only_where_flashinfer_splits_none(planner: Planner, graph: Graph, data: st.DataObject):
    """FlashInfer's own plan for as many requests as the graph has gives each one piece."""
    lengths = data.draw(st.lists(st.integers(graph.tokens, 40_000), min_size=graph.requests, max_size=graph.requests))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "keys_are_split", lambda *shape: True)
        patch.setattr(Graph, "split", True)
        own = graph.plan(planner, lengths)
    if not graph.split:
        assert {chunk for _, chunk in own.works} == {0}


def test_without_empty_requests_pieces_are_as_large_as_one_could_be(planner: Planner):
    assert Graph(32, 4, (32, 8), 32).plan(planner, [100] * 32).tile == 128
    assert Graph(32, 4, (32, 8), 125).plan(planner, [100] * 32).tile == 16
    assert Graph(32, 4, (32, 8), 124).plan(planner, [100] * 32).tile == 64


@settings(max_examples=60)
@given(graph=graphs(), data=st.data())
def test_the_exact_lengths_chunks_are_those_that_the_kernel_counts(planner: Planner, graph: Graph, data: st.DataObject):
    """The kernel counts chunks by exact lengths, in each step that one plan serves."""
    bound = data.draw(st.lists(st.integers(graph.tokens, 9000), min_size=1, max_size=graph.requests))
    wrapper = graph.wrapper(planner, bound)
    plan, before = wrapper.planned, wrapper.planned.ints.clone()
    keep_plan(wrapper, graph.requests)
    for _ in range(3):
        exact = [data.draw(st.integers(max(graph.tokens, length - 300), length)) for length in bound]
        seq_lens = torch.tensor(exact + [0] * (graph.requests - len(exact)), dtype=torch.int32)
        write_exact_lengths(wrapper, seq_lens, PAGE)

        if graph.split:
            counts = [-(-length // plan.chunk) for length in exact]
            merge, output = (plan.ints[plan.numbers[at] // 4 :] for at in (7, 8))
            tokens = graph.tokens * len(exact)
            assert merge[: tokens + 1].diff().tolist() == [count for count in counts for _ in range(graph.tokens)]
            assert output[: len(exact) + 1].diff().tolist() == [count * graph.tokens for count in counts]
            requests, chunks = (plan.ints[plan.numbers[at] // 4 :][: len(plan.works)].tolist() for at in (4, 6))
            expected = {(request, chunk) for request, count in enumerate(counts) for chunk in range(count)}
            assert set(zip(requests, chunks, strict=True)) == expected
        else:
            assert torch.equal(plan.ints, before), "a plan without chunks has nothing to correct"
        pages = wrapper._paged_kv_indptr_buf.diff()[: len(exact)]
        lengths = (pages - 1) * PAGE + wrapper._paged_kv_last_page_len_buf[: len(exact)]
        assert lengths.tolist() == exact
