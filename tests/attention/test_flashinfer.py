"""FlashInfer's wrappers planned from an upper bound, on a GPU against the oracle; each remedy is needed."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from vllm_async_spec.attention import ReferenceArguments, paged_attention
from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.attention.flashinfer import (
    PlanBuffers,
    PlanError,
    keep_plan,
    planned_requests,
    split_bytes,
    with_empty_requests,
    write_exact_lengths,
)

PAGE, HEADS, KV_HEADS, HEAD_SIZE = 16, 32, 8, 128


@pytest.mark.parametrize("named", [{"_backend": "cudnn"}, {"_backend": "fa2", "_cudnn_auto": True}])
def test_a_plan_of_an_unknown_kind_is_refused(named: dict[str, Any]):
    Wrapper = type("Wrapper", (), named)

    with pytest.raises(PlanError, match="a plan of Wrapper with backend 'cudnn' can't be corrected on the device"):
        write_exact_lengths(Wrapper(), torch.zeros(1, dtype=torch.int32), PAGE)


def test_plans_are_filled_on_the_host_whatever_pytorchs_default_device_is():
    class Wrapper:
        _paged_kv_last_page_len_buf = torch.zeros(3, dtype=torch.int32)

    with torch.device("meta"):
        filled = with_empty_requests(Wrapper)()._filled
    assert {name: each.tolist() for name, each in filled.items()} == {
        "qo_indptr": [0] * 4,
        "paged_kv_indptr": [0] * 4,
        "last_page_len": [0] * 3,
        "seq_lens": [0] * 3,
    }


@dataclass
class Case:
    """One batch: what the device knows, and the bound that the host plans from."""

    query_lens: list[int]
    exact: list[int]
    bound: list[int]
    window: int = -1
    room: int = 0
    """Tokens that each request has pages for, if more than its bound."""

    def __post_init__(self) -> None:
        torch.manual_seed(sum(self.exact))
        width = -(-max(self.room, *self.bound) // PAGE)
        rows = len(self.exact)
        self.table = torch.randperm(rows * width, device="cuda", dtype=torch.int32).reshape(rows, width)
        shape = (rows * width, PAGE, KV_HEADS, HEAD_SIZE)
        self.keys, self.values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.query = torch.randn(sum(self.query_lens), HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        self.measure()

    def measure(self) -> None:
        self.seq_lens = torch.tensor(self.exact, device="cuda", dtype=torch.int32)
        self.query_start = pad(torch.tensor(self.query_lens), (1, 0)).cumsum(0).int()

    def later(self, query_lens: list[int], exact: list[int], bound: list[int]) -> Case:
        case = copy.copy(self)
        case.query_lens, case.exact, case.bound = query_lens, exact, bound
        case.measure()
        return case

    def oracle(self) -> torch.Tensor:
        arguments = ReferenceArguments(
            query_start_loc=self.query_start.cuda(),
            seq_lens=self.seq_lens,
            block_table=self.table,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.bound),
            causal=True,
        )
        window = None if self.window < 0 else self.window + 1
        return paged_attention(self.query, self.keys, self.values, arguments, sliding_window=window)

    def plan(self, wrapper: Any, lengths: list[int], **options: Any) -> None:
        pages = [-(-length // PAGE) for length in lengths]
        indptr = pad(torch.tensor(pages), (1, 0)).cumsum(0).int().pin_memory()
        last = torch.tensor([(length - 1) % PAGE + 1 if length else 0 for length in lengths]).int().pin_memory()
        indices = torch.cat([row[:count] for row, count in zip(self.table, pages, strict=True)])
        names = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "page_size": PAGE, "q_data_type": torch.bfloat16}
        if hasattr(wrapper, "_jit_module") and type(wrapper).__name__.startswith("BatchDecode"):
            wrapper.plan(indptr, indices, last, head_dim=HEAD_SIZE, **names, **options)
        else:
            starts = self.query_start.pin_memory()
            wrapper.plan(starts, indptr, indices, last, head_dim_qk=HEAD_SIZE, causal=True, **names, **options)

    def run(self, wrapper: Any, **given: Any) -> torch.Tensor:
        out = wrapper.run(self.query, (self.keys, self.values), **given)
        assert isinstance(out, torch.Tensor)
        return out

    def captured(self, wrapper: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of one run, and what it writes to: the result of a run before it."""
        out, graph = self.run(wrapper), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(wrapper, out=out)
        return graph, out


def make_wrapper(kind: str, room: int = 128 << 20, **graph: Any) -> Any:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    workspace = torch.zeros(room, dtype=torch.uint8, device="cuda")
    if kind == "decode":
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
    if kind == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 needs SM90")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    return (with_empty_requests(wrapper) if graph else wrapper)(workspace, "NHD", backend=kind, **graph)


def graph_buffers(case: Case, requests: int) -> dict[str, Any]:
    """What a wrapper for a graph of such batches is made with, planned for so many requests."""
    sizes = {"qo_indptr": requests + 1, "paged_kv_indptr": requests + 1, "paged_kv_last_page_len": requests}
    sizes["paged_kv_indices"] = case.table.numel()
    made = {f"{name}_buf": torch.zeros(size, dtype=torch.int32, device="cuda") for name, size in sizes.items()}
    return made | {"use_cuda_graph": True}


def chunk_size(wrapper: Any) -> int:
    """Keys in a chunk of the plan; 0 if keys are not split."""
    plan = wrapper._plan_info
    if wrapper._backend == "fa3" or not plan[14]:
        return 0
    return int(wrapper._int_workspace_buffer.view(torch.int32)[int(plan[9]) // 4])


def random_case(seed: int, kind: str) -> Case:
    choose = random.Random(seed)
    query_lens, exact, bound = [], [], []
    for _ in range(choose.choice([1, 2, 5, 33])):
        tokens = 1 if kind == "decode" else choose.choice([1, 4, 4, 4, 2, 70])
        length = tokens + choose.choice([0, 3, choose.randrange(100), choose.randrange(6000), 16 * 9 - tokens])
        query_lens.append(tokens)
        exact.append(length)
        bound.append(length if tokens > 4 else length + choose.choice([0, 1, 3, 4, 20]))
    return Case(query_lens, exact, bound)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_planned_from_the_bound_equals_the_oracle_and_the_exact_plan(kind: str):
    wrapper, exact_wrapper = make_wrapper(kind), make_wrapper(kind)
    same = 0
    for seed in range(60):
        case = random_case(seed, kind)
        case.plan(wrapper, case.bound)
        write_exact_lengths(wrapper, case.seq_lens, PAGE)
        got, expected = case.run(wrapper), case.oracle()
        assert not got.isnan().any(), (seed, case.exact)
        assert close(got, expected), (seed, case.query_lens, case.exact, case.bound)
        case.plan(exact_wrapper, case.exact)
        exactly = case.run(exact_wrapper)
        # With chunks of one size the plan orders the work and nothing else, so not a bit may differ.
        if chunk_size(wrapper) == chunk_size(exact_wrapper):
            assert torch.equal(got, exactly), (seed, case.exact, case.bound)
            same += 1
    assert same >= 30


EDGES = [
    # Query lengths, exact lengths, bounds: beside a page's end, and bounds that end in another page.
    ([1, 1, 1, 1], [15, 16, 17, 1], [18, 19, 20, 4]),
    ([1, 1, 1], [31, 32, 33], [31, 32, 33]),
    ([1, 1], [6400, 6401], [6403, 6433]),
    ([4, 4, 4, 4], [15, 16, 17, 4], [18, 19, 20, 7]),
    ([4, 70, 4], [31, 96, 33], [34, 96, 36]),
    # Requests without query tokens, in between and as padding; drafts, prefills with and without context.
    ([4, 0, 4], [33, 0, 17], [36, 0, 20]),
    ([4, 2, 0, 0], [33, 17, 0, 0], [36, 20, 0, 0]),
    ([4, 70, 40, 0], [6000, 1000, 40, 0], [6020, 1000, 40, 0]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
@pytest.mark.parametrize("lengths", EDGES)
def test_ends_of_pages_and_requests_without_tokens_equal_the_oracle(
    kind: str, lengths: tuple[list[int], list[int], list[int]]
):
    if kind == "decode" and set(lengths[0]) != {1}:
        pytest.skip("the wrapper for decodes takes one token of each request")
    case, wrapper = Case(*lengths), make_wrapper(kind)
    case.plan(wrapper, case.bound)
    write_exact_lengths(wrapper, case.seq_lens, PAGE)
    assert close(case.run(wrapper), case.oracle())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_without_the_correction_the_bound_is_what_kernels_mask_by(kind: str):
    case = Case([1] * 3 if kind == "decode" else [4] * 3, [100, 33, 50], [103, 36, 53])
    wrapper = make_wrapper(kind)
    case.plan(wrapper, case.bound)
    assert not close(case.run(wrapper), case.oracle())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [-1, 300])
def test_chunks_that_differ_from_the_plans_are_counted_again(window: int, monkeypatch: pytest.MonkeyPatch):
    """Ten chunks of four pages exactly; eleven by the bound."""
    case = Case([4, 2, 70, 4], [640, 64, 129, 4], [643, 67, 129, 8], window)
    wrapper, exact_wrapper = make_wrapper("fa2"), make_wrapper("fa2")
    for each, lengths in ((wrapper, case.bound), (exact_wrapper, case.exact)):
        case.plan(each, lengths, fixed_split_size=4, window_left=window)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_carry_chunks", lambda *arguments: None)
        write_exact_lengths(wrapper, case.seq_lens, PAGE)
        assert not close(case.run(wrapper), case.oracle()), "the trap is gone: nothing needs to be counted again"
    write_exact_lengths(wrapper, case.seq_lens, PAGE)
    assert torch.equal(case.run(wrapper), case.run(exact_wrapper))
    assert close(case.run(wrapper), case.oracle())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16, 20])
@pytest.mark.parametrize("tokens", [2, 4, 5, 9])
@pytest.mark.parametrize("requests", [1, 2, 7, 32, 256])
def test_no_fewer_and_no_more_empty_requests_than_narrow_pieces_need(requests: int, tokens: int, group: int):
    def rows(planned: int) -> int:
        """Of a piece of work, by FlashInfer's rule."""
        largest = (requests * tokens - planned + 1) * group
        return 16 if largest <= 16 else 64 if largest <= 64 else 128

    planned = planned_requests(requests, tokens, group)
    needed = tokens * group
    assert rows(planned) == (16 if needed <= 16 else 64 if needed <= 64 else 128)
    assert planned == requests or rows(planned - 1) > rows(planned)
    assert requests <= planned <= requests * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fa2", "fa2 with empty requests", "fa3"])
@pytest.mark.parametrize("requests", [1, 3, 4, 32, 40, 128])
def test_a_captured_graph_runs_later_plans(kind: str, requests: int):
    tokens, most = 4, 5000
    lengths = [tokens] * requests
    case = Case(lengths, lengths, lengths, room=most)
    planned = planned_requests(requests, tokens, HEADS // KV_HEADS) if kind == "fa2 with empty requests" else requests
    wrapper = make_wrapper(kind[:3], **graph_buffers(case, planned))
    case.plan(wrapper, case.bound)
    if planned > requests:
        assert wrapper._plan_info[3] == 16, "every piece of work has room for one request"
    graph, out = case.captured(wrapper)
    choose = random.Random(requests)
    for live in (requests, requests, max(1, requests - 1), -(-requests // 2), requests):
        exact = [tokens + choose.choice([0, 3, 12, 13, 60, 1000, 4900]) for _ in range(live)]
        bound = [length + choose.choice([0, 1, 3]) for length in exact]
        padding = [0] * (requests - live)
        later = case.later([tokens] * live + padding, exact + padding, bound + padding)
        case.query.normal_()
        later.plan(wrapper, later.bound)
        write_exact_lengths(wrapper, later.seq_lens, PAGE)
        graph.replay()
        assert close(out[: live * tokens], later.oracle()[: live * tokens]), (exact, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fa2", "fa3"])
@pytest.mark.parametrize(("requests", "kept"), [(1, True), (3, True), (32, True), (40, True), (1, False), (3, False)])
def test_a_kept_plan_serves_a_graph_while_requests_grow_and_move(kind: str, requests: int, kept: bool):
    """Planned once for 700 tokens more than there are; pages and rows change in each step."""
    tokens, ahead = 4, 700
    exact = [tokens + 13 * row % 900 for row in range(requests)]
    case = Case([tokens] * requests, exact, [length + ahead for length in exact], room=2000)
    planned = planned_requests(requests, tokens, HEADS // KV_HEADS) if kind == "fa2" else requests
    wrapper = make_wrapper(kind, **graph_buffers(case, planned))
    case.plan(wrapper, case.bound)
    if kept:
        keep_plan(wrapper, requests)
    write_exact_lengths(wrapper, case.seq_lens, PAGE)
    graph, out = case.captured(wrapper)
    assert close(out, case.oracle())
    right = []
    for step in (1, 60, 350, 699, 5):
        later = case.later(case.query_lens, [length + step for length in exact], case.bound)
        later.table = case.table.flatten()[torch.randperm(case.table.numel(), device="cuda")].view_as(case.table)
        case.query.normal_()
        write_exact_lengths(wrapper, later.seq_lens, PAGE, later.table)
        graph.replay()
        right.append(close(out, later.oracle()))
    assert all(right) is (kept or kind == "fa3"), right


@pytest.mark.gpu
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("requests", "tokens"), [(1, 4), (4, 4), (32, 4), (32, 8)])
def test_a_plan_for_a_graph_has_the_room_that_is_counted_for_it(requests: int, tokens: int, empty: bool):
    case = Case([tokens] * requests, [tokens] * requests, [tokens] * requests)
    planned = planned_requests(requests, tokens, HEADS // KV_HEADS) if empty else requests
    room = split_bytes(planned, requests, tokens, HEADS, KV_HEADS, HEAD_SIZE, torch.device("cuda"))
    case.plan(make_wrapper("fa2", room, **graph_buffers(case, planned)), case.bound)
    with pytest.raises(RuntimeError, match="Buffer overflow"):
        case.plan(make_wrapper("fa2", room - 16, **graph_buffers(case, planned)), case.bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "tokens"), [(33, 4), (128, 8), (256, 2)])
def test_a_plan_for_more_requests_needs_no_room(requests: int, tokens: int):
    case = Case([tokens] * requests, [tokens] * requests, [tokens] * requests)
    wrapper = make_wrapper("fa2", 16, **graph_buffers(case, planned_requests(requests, tokens, HEADS // KV_HEADS)))
    case.plan(wrapper, case.bound)
    assert wrapper._plan_info[0] == requests, "work is launched that no request has"
    assert close(case.run(wrapper), case.oracle())


def race(kind: str, fenced: bool) -> bool:
    """Whether a kernel got its own plan, when another was made before that had been copied to the device."""
    tokens = 1 if kind == "decode" else 4
    first = Case([tokens] * 4, [900, 33, 1500, 64], [903, 36, 1503, 67])
    second = Case([tokens] * 2, [40, 20], [43, 23])
    wrapper, other = make_wrapper(kind), make_wrapper(kind)
    if not fenced:
        other._pin_memory_int_workspace_buffer = wrapper._pin_memory_int_workspace_buffer
    for case, which in ((first, wrapper), (second, other)):
        # What is compiled, loaded and allocated at first would hide the race.
        case.plan(which, case.bound)
        write_exact_lengths(which, case.seq_lens, PAGE)
        case.run(which)
    expected = first.oracle()
    buffers = PlanBuffers(4, wrapper._pin_memory_int_workspace_buffer.nbytes, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    if fenced:
        buffers.lend(wrapper)
    first.plan(wrapper, first.bound)
    write_exact_lengths(wrapper, first.seq_lens, PAGE)
    got = first.run(wrapper)
    if fenced:
        buffers.lend(other)
    second.plan(other, second.bound)
    return close(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_a_plan_made_before_the_last_one_was_copied_needs_another_buffer(kind: str, fenced: bool):
    """In a process of its own: a kernel with another's plan may read addresses that are not there."""
    code = f"import test_flashinfer; raise SystemExit(0 if test_flashinfer.race({kind!r}, {fenced}) else 3)"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    right = done.returncode == 0
    garbage = done.returncode == 3 or "CUDA error" in done.stderr
    assert right if fenced else garbage, done.stderr[-2000:]
