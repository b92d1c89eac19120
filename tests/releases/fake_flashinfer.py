"""What vLLM's FlashInfer backend needs of flashinfer-python, holding plans as it does; attention is not there."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_async_spec.compat.stubs import put_modules

INTS = 1 << 16
PROCESSORS = 40
"""Of the device that plans are for."""

compiled: list[tuple[Any, ...]] = []
loaded: list[tuple[Any, ...]] = []


class Wrapper:
    backend = "fa2"
    """What `auto` becomes; on Hopper it may be either, elsewhere it is this."""

    def __init__(self, workspace: torch.Tensor, layout: str = "NHD", use_cuda_graph: bool = False, **buffers: Any):
        self._float_workspace_buffer, self._kv_layout = workspace, layout
        self.asked = self._backend = buffers.get("backend", "auto")
        self.is_cuda_graph_enabled = use_cuda_graph
        # Prefills and decodes name their buffers differently.
        given = {name.removesuffix("fer"): buffer for name, buffer in buffers.items()}
        self._qo_indptr_buf = given.get("qo_indptr_buf")
        self._paged_kv_indptr_buf = given.get("paged_kv_indptr_buf")
        self._paged_kv_indices_buf = given.get("paged_kv_indices_buf")
        self._paged_kv_last_page_len_buf = given.get("paged_kv_last_page_len_buf")
        self._pin_memory_int_workspace_buffer = torch.zeros(INTS, dtype=torch.uint8)
        self._int_workspace_buffer = torch.zeros(INTS, dtype=torch.uint8)
        self._window_left = -1
        self._max_total_num_rows = 0
        self.plans: list[dict[str, Any]] = []

    def plan(self, *args: Any, **kwargs: Any) -> None:
        if self._backend == "auto":
            self._backend = self.backend
        if "head_dim_qk" in kwargs:
            dtypes = kwargs["q_data_type"], kwargs["kv_data_type"], kwargs["o_data_type"], torch.int32
            flags = kwargs["window_left"] >= 0, (kwargs["logits_soft_cap"] or 0.0) > 0, False
            self.module = (self._backend, *dtypes, kwargs["head_dim_qk"], kwargs["head_dim_qk"], 0, *flags)
        starts = kwargs.get("qo_indptr")
        indptr = kwargs.get("paged_kv_indptr", kwargs.get("indptr"))
        last = kwargs.get("paged_kv_last_page_len", kwargs.get("last_page_len"))
        tokens = kwargs.get("q_len_per_req", 1)
        self.plans.append(kwargs | {"buffer": self._pin_memory_int_workspace_buffer})
        if self.is_cuda_graph_enabled:
            self._paged_kv_indptr_buf[: len(indptr)].copy_(indptr)
            self._paged_kv_last_page_len_buf[: len(last)].copy_(last)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf = indptr.clone(), last.clone()
        if starts is not None:
            if self.is_cuda_graph_enabled:
                assert len(starts) == len(self._qo_indptr_buf), "a graph's batch has one size"
                self._qo_indptr_buf.copy_(starts)
            else:
                self._qo_indptr_buf = starts.clone()
            self._qo_indptr_last, self._max_q_len = int(starts[-1]), int(starts.diff().max())
        elif tokens > 1:
            # Decode wrappers keep the number under another name than prefill wrappers do.
            self._qo_indptr_buf = starts = tokens * torch.arange(len(indptr), dtype=torch.int32)
            self._q_len_per_req = tokens
        page_size = kwargs["page_size"]
        if self._backend == "fa3":
            self._plan_sm90(indptr, last, page_size)
        elif starts is not None:
            # The first plan of a graph says how many tokens it has, in whatever shares.
            self._max_total_num_rows = self._max_total_num_rows or int(starts[-1])
            most = self._max_total_num_rows - (len(starts) - 1) + 1
            group = kwargs["num_qo_heads"] // kwargs["num_kv_heads"]
            rows = group * (most if self.is_cuda_graph_enabled else int(starts[-1]) // (len(starts) - 1))
            tile = 16 if rows <= 16 else 64 if rows <= 64 else 128
            self._plan_split(starts.diff(), indptr.diff(), tile, kwargs)

    def _plan_split(self, query_lens: torch.Tensor, pages: torch.Tensor, tile: int, given: dict[str, Any]) -> None:
        group, split = given["num_qo_heads"] // given["num_kv_heads"], not given["disable_split_kv"]
        splits, tiles = 2 * PROCESSORS // given["num_kv_heads"], -(-query_lens * group // tile)
        longest = max(1, int(pages.max()))
        fit = (n for n in range(1, longest) if int((tiles * -(-pages.clamp(min=1) // n)).sum()) <= splits)
        chunk = next(fit, longest)
        counts = -(-pages.clamp(min=1) // chunk) if split else torch.ones_like(pages)
        rows = torch.arange(len(pages))
        requests = rows.repeat_interleave(counts * tiles)
        chunks = torch.cat([torch.arange(int(n)).repeat(int(m)) for n, m in zip(counts, tiles, strict=True)])
        unused = torch.empty(0, dtype=torch.int64)
        if self.is_cuda_graph_enabled:
            tokens = self._max_total_num_rows or 0
            most = max(splits, -(-tokens * group // tile) + len(pages) - 1)
            unused = torch.full((most - len(requests),), 7777)
        output = torch.nn.functional.pad((counts * query_lens).cumsum(0), (1, 0))
        merge = torch.nn.functional.pad(counts.repeat_interleave(query_lens).cumsum(0), (1, 0))
        size = torch.tensor([chunk * given["page_size"]])
        arrays = [torch.cat([requests, unused]), torch.cat([chunks, unused]), merge, output, size]
        self._used = len(requests)
        first, *others = self._write(arrays)
        works, tokens = len(requests) + len(unused), int(query_lens.sum())
        plan = [works, tokens, 0, tile, first, 0, *others, 0, 0, 0]
        self._plan_info = [*plan, int(self.is_cuda_graph_enabled), int(split)]

    def _write(self, arrays: Sequence[torch.Tensor]) -> list[int]:
        """Put arrays into the plan's buffer; returns their offsets in bytes."""
        offsets, data, end = [], self._int_workspace_buffer.view(torch.int32), 0
        for values in arrays:
            offsets.append(end * 4)
            data[end : end + len(values)] = values
            end += -(-len(values) // 4) * 4
        return offsets

    def split_is_right(self, page_size: int) -> bool:
        """Whether work and merge have the chunks that the kernel counts by the lengths that it reads."""
        if self._backend == "fa3" or self._qo_indptr_buf is None:
            return True
        plan, data = self._plan_info, self._int_workspace_buffer.view(torch.int32)
        requests, chunks, merge, output = (data[plan[at] // 4 :] for at in (4, 6, 7, 8))
        query_lens = self._qo_indptr_buf.diff().tolist()
        if not plan[14]:
            # All that is launched runs, so it is of requests, and each with query tokens has some.
            launched = {int(request) for request in requests[: plan[0]]}
            return {row for row, n in enumerate(query_lens) if n} <= launched <= set(range(len(query_lens)))
        size = int(data[plan[9] // 4])
        counts = [-(-max(length, 1) // size) for length in self.lengths(page_size)]
        assert plan[0] >= self._used, "some work is not launched"
        work = {(int(requests[at]), int(chunks[at])) for at in range(self._used)}
        expected = {(row, chunk) for row, n in enumerate(counts) if query_lens[row] for chunk in range(n)}
        by_token = [n for n, times in zip(counts, query_lens, strict=True) for _ in range(times)]
        by_request = [n * times for n, times in zip(counts, query_lens, strict=True)]
        return (
            work == expected
            and merge[: len(by_token) + 1].diff().tolist() == by_token
            # Nothing is read of requests without tokens.
            and all(n in (0, found) for n, found in zip(by_request, output.diff().tolist(), strict=False))
        )

    def _plan_sm90(self, indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
        """Two pieces of work a request, in another order than the requests, dealt out to the processors."""
        lengths = (indptr[1:] - indptr[:-1] - 1) * page_size + last
        requests = torch.arange(len(lengths)).flip(0).repeat(2).int()
        per_processor = torch.full((PROCESSORS,), len(requests) // PROCESSORS)
        per_processor[-1] += len(requests) % PROCESSORS
        work_indptr = torch.nn.functional.pad(per_processor.cumsum(0), (1, 0)).int()
        self._int_workspace_buffer.view(torch.int32).fill_(-7)
        empty = torch.zeros_like(requests)
        arrays = (empty, empty, empty, empty, lengths[requests.long()], empty, work_indptr, requests)
        self._plan_info = [*self._write(arrays), 0]

    def lengths(self, page_size: int) -> list[int]:
        if self._backend == "fa3":
            data, plan = self._int_workspace_buffer.view(torch.int32), [offset // 4 for offset in self._plan_info[:8]]
            count = int(data[plan[6] + PROCESSORS])
            found = {int(data[plan[7] + at]): int(data[plan[4] + at]) for at in range(count)}
            padding = data[plan[4] + count : plan[5]]
            assert (padding == -7).all(), "written behind the last piece of work"
            return [found[request] for request in sorted(found)]
        pages = self._paged_kv_indptr_buf.diff()
        last = self._paged_kv_last_page_len_buf[: len(pages)]
        return torch.where(pages == 0, 0, (pages - 1) * page_size + last).tolist()


class XqaSpec:
    def __init__(self, *shape: Any):
        self.shape, self.name = shape, repr(shape)

    def get_library_path(self) -> str:
        return "/nonexistent"

    def build_and_load(self) -> None:
        compiled.append(self.shape)


def get_seq_lens(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last


def fast_decode_plan(wrapper: Wrapper, **kwargs: Any) -> None:
    """Under a CUDA graph it leaves the buffers to the caller, and only plans."""
    wrapper.plans.append(kwargs | {"buffer": wrapper._pin_memory_int_workspace_buffer})


def install() -> None:
    put_modules(
        {
            "flashinfer": {
                "BatchDecodeWithPagedKVCacheWrapper": Wrapper,
                "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
                "get_seq_lens": get_seq_lens,
            },
            "flashinfer.decode": {"fast_decode_plan": fast_decode_plan},
            "flashinfer.prefill": {"get_batch_prefill_module": lambda *arguments: loaded.append(arguments)},
            "flashinfer.utils": {},
            "flashinfer.jit": {},
            "flashinfer.jit.xqa": {"gen_xqa_module": XqaSpec},
        }
    )
