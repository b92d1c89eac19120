"""The contract of FlashInfer's trtllm-gen and XQA functions, written down a second time: one request at a time.

A stand-in for kernels that most machines can't run, independent of the package: it asserts what docstrings and checks
ask of each argument, and computes from the arguments alone. What a kernel leaves undefined is NaN, and so should KV
slots behind a request's end be. Sources: flashinfer-python 0.6.6, 0.6.14 and 0.7.0.post1, `decode.py`, `prefill.py`,
`xqa.py` and `csrc/xqa/mha.cu`.
"""

import inspect
from itertools import pairwise
from typing import Any

import torch

KvCache = tuple[torch.Tensor, torch.Tensor]


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KvCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    kv_layout: str = "HND",
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
) -> torch.Tensor:
    assert backend in ("xqa", "trtllm-gen"), "auto looks at the device, which is not that of the test"
    if backend == "xqa":
        assert max_q_len is None, "xqa backend does not support cum_seq_lens_q"
        assert cum_seq_lens_q is None, "xqa backend does not support cum_seq_lens_q"
        return xqa_batch_decode_with_kv_cache(
            query,
            kv_cache,
            workspace_buffer,
            block_tables,
            seq_lens,
            max_seq_len,
            bmm1_scale,
            bmm2_scale,
            window_left,
            kv_layout,
            q_len_per_req,
            mask,
        )
    assert mask is None, "a draft mask is XQA's"
    if q_len_per_req is not None:
        assert max_q_len is None, "not looked at beside q_len_per_req"
        assert cum_seq_lens_q is None, "not looked at beside q_len_per_req"
        _check_integer(q_len_per_req)
        assert query.shape[0] % q_len_per_req == 0, "the kernel would count requests by rounding down"
        starts = list(range(0, query.shape[0] + 1, q_len_per_req))
    else:
        starts = _cumulative(cum_seq_lens_q, query)
        _check_integer(max_q_len)
        assert all(b - a <= max_q_len for a, b in pairwise(starts)), "the grid has too few rows"
    _check_batch(query, block_tables, seq_lens, max_seq_len, len(starts) - 1)
    scales = bmm1_scale, bmm2_scale
    return _attend(query, kv_cache, block_tables, seq_lens, starts, scales, window_left, kv_layout)


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KvCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    kv_layout: str = "NHD",
    q_len_per_req: int = 1,
    mask: torch.Tensor | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_integer(q_len_per_req)
    if q_cu_seq_lens is not None:
        assert q_len_per_req > 1, "q_cu_seq_lens requires q_seq_len > 1 (the max draft len)"
        starts = _cumulative(q_cu_seq_lens, query)
        longest = max(b - a for a, b in pairwise(starts))
        assert longest <= q_len_per_req, "q_seq_len is the most"
    else:
        assert query.shape[0] % q_len_per_req == 0, "query.view(batch_size, q_len_per_req, ...)"
        starts = list(range(0, query.shape[0] + 1, q_len_per_req))
    _check_batch(query, block_tables, seq_lens, max_seq_len, len(starts) - 1)
    drafts = None
    if q_len_per_req > 1:
        assert mask is not None, "Mask is required for speculative decoding"
        words = (q_len_per_req + 31) // 32 * 2
        packed = [query.shape[0]] if q_cu_seq_lens is not None else [len(starts) - 1, q_len_per_req]
        assert list(mask.shape) == [*packed, words]
        assert mask.dtype == torch.uint16
        assert mask.is_contiguous()
        assert mask.device == query.device
        drafts = mask.reshape(-1, words).int()
    else:
        assert mask is None, "the kernel for single tokens has no mask"
    scales = bmm1_scale, bmm2_scale
    return _attend(query, kv_cache, block_tables, seq_lens, starts, scales, window_left, kv_layout, drafts)


_XQA = inspect.signature(xqa_batch_decode_with_kv_cache)
_XQA_BEFORE = _XQA.replace(parameters=[each for each in _XQA.parameters.values() if each.name != "q_cu_seq_lens"])


def xqa_batch_decode_with_kv_cache_before_0_6_16(*given: Any, **named: Any) -> torch.Tensor:
    call = _XQA_BEFORE.bind(*given, **named)
    call.apply_defaults()
    q_len_per_req, window_left = call.arguments["q_len_per_req"], call.arguments["window_left"]
    assert q_len_per_req == 1 or window_left == -1, "csrc/xqa/mha.cu cuts a window by tiles, as for a tree of drafts"
    return xqa_batch_decode_with_kv_cache(*call.args)


xqa_batch_decode_with_kv_cache_before_0_6_16.__signature__ = _XQA_BEFORE


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KvCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    kv_layout: str = "HND",
) -> torch.Tensor:
    starts = _cumulative(cum_seq_lens_q, query)
    _check_integer(batch_size)
    assert batch_size == len(starts) - 1
    _check_integer(max_q_len)
    assert all(b - a <= max_q_len for a, b in pairwise(starts)), "the grid has too few rows"
    _check_batch(query, block_tables, seq_lens, max_kv_len, batch_size)
    page_size = kv_cache[0].shape[1 if kv_layout == "NHD" else 2]
    ends = [0]
    for length in seq_lens.tolist():
        ends.append(ends[-1] + -(-length // page_size))
    _check_int32(cum_seq_lens_kv, query, (batch_size + 1,))
    # "cumulative sequence length for kv_cache", which is pages in flashinfer's tests and benchmarks, and in vLLM.
    assert cum_seq_lens_kv.tolist() == ends, "cumulative pages"
    scales = bmm1_scale, bmm2_scale
    return _attend(query, kv_cache, block_tables, seq_lens, starts, scales, window_left, kv_layout)


def _check_integer(value: object) -> None:
    assert type(value) is int, f"an integer of the host, not {value!r}"
    assert value >= 1


def _check_int32(tensor: torch.Tensor | None, query: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert tensor is not None
    assert tensor.dtype == torch.int32
    assert tuple(tensor.shape) == shape
    assert tensor.device == query.device
    assert tensor.is_contiguous(), "the kernels are given an address and no strides"


def _cumulative(tensor: torch.Tensor | None, query: torch.Tensor) -> list[int]:
    assert tensor is not None
    _check_int32(tensor, query, (tensor.numel(),))
    starts = tensor.tolist()
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] == query.shape[0], "or the last rows are garbage"
    return starts


def _check_batch(
    query: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, most: int, requests: int
) -> None:
    assert requests >= 1
    assert query.dim() == 3
    _check_int32(seq_lens, query, (requests,))
    _check_int32(block_tables, query, (requests, block_tables.shape[1]))
    _check_integer(most)
    assert most >= int(seq_lens.max()), "keys behind the maximum are not reached"


def _attend(query, kv_cache, block_tables, seq_lens, starts, scales, window_left, kv_layout, drafts=None):
    assert kv_layout in ("HND", "NHD")
    keys, values = kv_cache if kv_layout == "NHD" else (cache.transpose(1, 2) for cache in kv_cache)
    assert keys.shape[1] in (16, 32, 64, 128)
    assert type(window_left) is int
    assert window_left >= -1
    for scale in scales:
        if isinstance(scale, torch.Tensor):
            assert scale.dtype == torch.float32
            assert scale.numel() == 1
            assert scale.device == query.device, "the kernel dereferences its address"
        else:
            assert type(scale) is float
    out = torch.full_like(query, torch.nan)
    for row, length in enumerate(seq_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        count = end - first
        if count == 0 or length == 0:
            continue
        assert length >= count
        slots = torch.arange(length)
        pages = block_tables[row, slots // keys.shape[1]].long()
        gathered = [cache[pages, slots % keys.shape[1]] for cache in (keys, values)]
        group = query.shape[1] // keys.shape[2]
        k, v = (each.repeat_interleave(group, dim=1) for each in gathered)
        at = torch.arange(length - count, length)[:, None]
        if drafts is None:
            sees = slots <= at
        else:  # a bit for each query token of the request; what is before them is seen by all
            bits = drafts[first:end, :, None] >> torch.arange(16) & 1
            sees = torch.cat([torch.ones(count, length - count), bits.flatten(1)[:, :count]], dim=1).bool()
        if window_left >= 0:
            sees = sees & (slots >= at - window_left)
        logits = torch.einsum("qhd,khd->hqk", query[first:end], k) * scales[0]
        weights = logits.masked_fill(~sees, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v) * scales[1]
    return out
