"""How long kernels take to verify drafts over a paged KV cache: each alone, and in a layer.

    python -m benchmarks kernels [--json FILE] [--tokens N] [--kv-heads N]

The plugin's choice of a kernel for each batch on Hopper follows from this (docs/measured-flashinfer.md). A CUDA graph
holds 16 calls over the caches of four layers, so that keys come from memory. The result is the median of ten replays.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import linear, silu

from benchmarks.machine import MachineError
from benchmarks.present import Grid
from benchmarks.shapes import find_shape
from vllm_async_spec.streams import captured

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
KEYS = (264, 1024, 4096, 16384)
PAGE = 16
_8B = find_shape("8b").target
HEADS, KV_HEADS, HEAD_SIZE = _8B["num_attention_heads"], _8B["num_key_value_heads"], _8B["head_dim"]
HIDDEN, INTERMEDIATE = _8B["hidden_size"], _8B["intermediate_size"]
_LAYERS, _CALLS, _REPLAYS = 4, 16, 10
_WORKSPACE = 394 << 20  # bytes, vLLM's
_NEAR = 2e-2
"""Largest allowed difference of two kernels' outputs, in bfloat16 with values of size 1."""


class KernelError(RuntimeError):
    """The number of heads is wrong, or a kernel is; the message says which."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests with equal lengths and equal numbers of query tokens, and the caches of some layers."""

    requests: int
    keys: int
    tokens: int
    kv_heads: int = KV_HEADS

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values, (page, KV head, token, head size), of each layer."""
        shape = self.requests * self._pages + 1, self.kv_heads, PAGE, HEAD_SIZE
        return [(_noise(*shape), _noise(*shape)) for _ in range(_LAYERS)]

    def table(self) -> torch.Tensor:
        pages = 1 + torch.arange(self.requests * self._pages, dtype=torch.int32, device="cuda")
        return pages.view(self.requests, -1)

    @property
    def _pages(self) -> int:
        return -(-self.keys // PAGE)

    @property
    def starts(self) -> torch.Tensor:
        """Where each request's query tokens begin, on the host."""
        return torch.arange(self.requests + 1, dtype=torch.int32) * self.tokens

    @property
    def page_starts(self) -> torch.Tensor:
        """Where each request's pages begin, on the host."""
        return torch.arange(self.requests + 1, dtype=torch.int32) * self._pages


Call = Callable[[int], torch.Tensor]
"""Runs attention in the layer of this number."""


def measure(tokens: int, kv_heads: int) -> dict[str, Any]:
    """The result file: microseconds of a call with `tokens` query tokens a request, and 32 query heads.

    Raises:
        KernelError: there is no Hopper GPU, a library is missing, the heads have no groups, or the kernels' outputs
            differ.
    """
    if HEADS % kv_heads:
        raise KernelError(f"{HEADS} query heads can't be grouped over {kv_heads} KV heads; give a divisor of {HEADS}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise MachineError("PyTorch finds no GPU of compute capability 9.0, and no other GPU has all of these kernels")
    if missing := [name for name in ("flashinfer", "vllm") if find_spec(name) is None]:
        raise MachineError(
            f"{' and '.join(missing)} can't be imported, and the benchmark needs both flashinfer and vllm; install both"
        )
    batches = [Batch(requests, keys, tokens, kv_heads) for requests in REQUESTS for keys in KEYS]
    matrices = Matrices(kv_heads)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "flashinfer": version("flashinfer-python"),
        "tokens": tokens,
        "group": HEADS // kv_heads,
        "rows": [{"requests": each.requests, "keys": each.keys, **_measured(each, matrices)} for each in batches],
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One for each batch, in the order of `columns`."""
    for row in found["rows"]:
        times = (f"{row['alone_us'][name]:.0f} / {row['layer_us'][name]:.0f}" for name in _kernels(found))
        yield (f"{row['requests']}", f"{row['keys']:,}", *times)


def columns(found: dict[str, Any]) -> tuple[str, ...]:
    return ("requests", "keys each", *_kernels(found))


def by_rows(results: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """FlashAttention 2 and XQA in a layer: one row for each batch, one cell for each of `results`."""
    for batches in zip(*(found["rows"] for found in results), strict=True):
        times = (f"{row['layer_us']['FlashAttention 2']:.0f} / {row['layer_us']['XQA']:.0f}" for row in batches)
        yield (f"{batches[0]['requests']}", f"{batches[0]['keys']:,}", *times)


def table(found: dict[str, Any]) -> Table:
    title = (
        f"Microseconds a call, alone / in a layer: {found['device']}, FlashInfer {found['flashinfer']}, "
        f"{found['tokens']} query tokens a request, {found['group']} query heads a KV head"
    )
    return Grid(columns(found), list(rows(found))).table(title)


def _kernels(found: dict[str, Any]) -> list[str]:
    return list(found["rows"][0]["alone_us"])


def _measured(batch: Batch, matrices: Matrices) -> dict[str, dict[str, float]]:
    query, caches = _noise(batch.requests * batch.tokens, HEADS, HEAD_SIZE), batch.caches()
    calls = {
        "FlashAttention 2": _planned(batch, query, caches, "fa2", _planned_requests(batch)),
        "FlashAttention 2, wide": _planned(batch, query, caches, "fa2", batch.requests),
        "FlashAttention 3": _planned(batch, query, caches, "fa3", batch.requests),
        "XQA": _xqa(batch, query, caches),
        "vLLM's FlashAttention 3": _vllms(batch, query, caches),
    }
    said = {name: call(0).clone().view_as(query) for name, call in calls.items()}
    first = next(iter(said))
    for name, output in said.items():
        if not torch.allclose(output, said[first], rtol=_NEAR, atol=_NEAR):
            raise KernelError(
                f"{name} and {first} give different outputs for {batch}, so their times can't be compared"
            )
    rest = _microseconds(matrices.around(lambda layer: query, query.shape[0]))
    layers = {name: matrices.around(call, query.shape[0]) for name, call in calls.items()}
    return {
        "alone_us": {name: round(_microseconds(call), 2) for name, call in calls.items()},
        "layer_us": {name: round(_microseconds(layer) - rest, 2) for name, layer in layers.items()},
    }


class Matrices:
    """The work of an 8b Llama's layer except attention, with the weights of some layers."""

    def __init__(self, kv_heads: int = KV_HEADS) -> None:
        shapes = (
            ((HEADS + 2 * kv_heads) * HEAD_SIZE, HIDDEN),
            (HIDDEN, HEADS * HEAD_SIZE),
            (2 * INTERMEDIATE, HIDDEN),
            (HIDDEN, INTERMEDIATE),
        )
        self._weights = [tuple(_noise(*shape) for shape in shapes) for _ in range(_LAYERS)]

    def around(self, attend: Call, tokens: int) -> Call:
        """A whole layer, with `attend` as its attention."""
        hidden = _noise(tokens, HIDDEN)

        def run(layer: int) -> torch.Tensor:
            qkv, out, gate_up, down = self._weights[layer]
            linear(hidden, qkv)
            attend(layer)
            gate, up = linear(linear(hidden, out), gate_up).chunk(2, dim=-1)
            return linear(silu(gate) * up, down)

        return run


def _planned_requests(batch: Batch) -> int:
    from vllm_async_spec.attention.flashinfer import planned_requests

    return planned_requests(batch.requests, batch.tokens, HEADS // batch.kv_heads)


def _planned(batch: Batch, query: torch.Tensor, caches: list[Any], backend: str, planned: int) -> Call:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    from vllm_async_spec.attention.flashinfer import with_empty_requests

    pages, out = batch.table().flatten(), torch.empty_like(query)
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device="cuda")
    wrapper = with_empty_requests(BatchPrefillWithPagedKVCacheWrapper)(
        torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda"),
        "HND",
        use_cuda_graph=True,
        qo_indptr_buf=zeros(planned + 1),
        paged_kv_indptr_buf=zeros(planned + 1),
        paged_kv_indices_buf=torch.zeros_like(pages),
        paged_kv_last_page_len_buf=zeros(planned),
        backend=backend,
    )
    last = torch.full((batch.requests,), (batch.keys - 1) % PAGE + 1, dtype=torch.int32)
    heads = {"num_qo_heads": HEADS, "num_kv_heads": batch.kv_heads, "head_dim_qk": HEAD_SIZE, "page_size": PAGE}
    dtypes = {"q_data_type": query.dtype, "kv_data_type": query.dtype}
    wrapper.plan(batch.starts, batch.page_starts, pages, last, causal=True, **heads, **dtypes)
    return lambda layer: wrapper.run(query, caches[layer], out=out)


def _xqa(batch: Batch, query: torch.Tensor, caches: list[Any]) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    from vllm_async_spec import CommonAttentionMetadata
    from vllm_async_spec.attention import TrtllmAdapter, TrtllmShape, bmm_scales

    shape = TrtllmShape(
        kernel="xqa",
        capability=(9, 0),
        page_size=PAGE,
        head_size=HEAD_SIZE,
        num_heads=HEADS,
        num_kv_heads=batch.kv_heads,
        query_dtype=query.dtype,
        kv_dtype=query.dtype,
        query_tokens=batch.tokens,
        sliding_window=None,
        kv_layout="HND",
    )
    metadata = CommonAttentionMetadata(
        query_start_loc=batch.starts.cuda(),
        query_start_loc_cpu=batch.starts,
        seq_lens=torch.full((batch.requests,), batch.keys, dtype=torch.int32, device="cuda"),
        num_reqs=batch.requests,
        num_actual_tokens=query.shape[0],
        max_query_len=batch.tokens,
        max_seq_len=batch.keys,
        block_table_tensor=batch.table(),
        slot_mapping=torch.zeros(query.shape[0], dtype=torch.int64, device="cuda"),
    )
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    decode = TrtllmAdapter(shape).arguments(metadata).decode
    assert decode is not None
    given = decode.xqa_batch_decode() | bmm_scales(HEAD_SIZE**-0.5)
    return lambda layer: xqa_batch_decode_with_kv_cache(
        query=query, kv_cache=caches[layer], workspace_buffer=workspace, **given
    )


def _vllms(batch: Batch, query: torch.Tensor, caches: list[Any]) -> Call:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    out, table = torch.empty_like(query), batch.table()
    starts, used = batch.starts.cuda(), torch.full((batch.requests,), batch.keys, dtype=torch.int32, device="cuda")
    by_token = [tuple(each.transpose(1, 2).contiguous() for each in layer) for layer in caches]
    return lambda layer: flash_attn_varlen_func(
        q=query,
        k=by_token[layer][0],
        v=by_token[layer][1],
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=batch.tokens,
        seqused_k=used,
        max_seqlen_k=batch.keys,
        softmax_scale=HEAD_SIZE**-0.5,
        causal=True,
        block_table=table,
        fa_version=3,
    )


def _microseconds(call: Call) -> float:
    def calls(count: int) -> None:
        for number in range(count):
            call(number % _LAYERS)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls(_LAYERS)
    torch.cuda.synchronize()
    replay = captured(lambda: calls(_CALLS), None, stream=stream)
    times: list[float] = []
    for _ in range(3 + _REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return statistics.median(times[3:])


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
