"""FlashInfer's trtllm-gen (SM100, SM103) and XQA (SM90, SM12x) over a paged KV cache, from device `seq_lens`.

Neither is planned: each kernel reads the length of every request on the device. trtllm-gen uses the maxima only to
choose the kernel and the number of KV splits, so an upper bound is enough. XQA takes `max_seq_len` but uses the width
of `block_table` instead.

Sources: flashinfer-python 0.6.6, 0.6.14 and 0.7.0.post1: `trtllm_batch_decode_with_kv_cache` and
`xqa_batch_decode_with_kv_cache` in `decode.py`, `trtllm_batch_context_with_kv_cache` in `prefill.py`, `xqa.py`,
`csrc/xqa/mha.cu`, `csrc/trtllm_fmha_kernel_launcher.cu`. FlashInfer is imported only to detect its features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_async_spec.attention.base import HostNeed
from vllm_async_spec.attention.trtllm_shape import TRTLLM_GEN, XQA, TrtllmShape
from vllm_async_spec.metadata import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class TrtllmDecodeArguments:
    """The decoded requests, in the terms of FlashInfer's two decode functions.

    The layer provides query, output, KV cache, workspace and `bmm_scales`.
    """

    kernel: str
    """`trtllm-gen` or `xqa`."""
    tokens: slice
    """Tokens of query and output that belong to these requests."""
    block_tables: torch.Tensor
    """(requests, pages) int32, device, contiguous."""
    seq_lens: torch.Tensor
    """(requests,) int32, device: exact number of keys of each request."""
    max_seq_len: int
    """Upper bound of `seq_lens`."""
    max_q_len: int
    """Query tokens of each request; if the batch is ragged, an upper bound."""
    cum_seq_lens_q: torch.Tensor | None
    """(requests + 1,) int32, device: cumulative query lengths; None if each request has `max_q_len`."""
    mask: torch.Tensor | None
    """For XQA and several query tokens: (requests, `max_q_len`, words), (tokens, words) if ragged; uint16, device."""
    window_left: int
    """Keys seen before a query token's own; -1 is no limit."""
    kv_layout: str

    def trtllm_batch_decode(self) -> dict[str, Any]:
        """Keyword arguments of `trtllm_batch_decode_with_kv_cache`.

        Raises:
            ValueError: the batch is ragged and the kernel is XQA, which needs `xqa_batch_decode` for such a batch.
        """
        ragged = self.cum_seq_lens_q is not None
        if ragged and self.kernel == XQA:
            raise ValueError(
                "the batch is ragged; trtllm_batch_decode_with_kv_cache passes XQA uniform batches only, so use the "
                "arguments of xqa_batch_decode()"
            )
        return self._common() | {
            "backend": self.kernel,
            # Set always, because the default is 1, and FlashInfer ignores the next two unless this is None.
            "q_len_per_req": None if ragged else self.max_q_len,
            "max_q_len": self.max_q_len if ragged else None,
            "cum_seq_lens_q": self.cum_seq_lens_q,
            "mask": self.mask,
        }

    def xqa_batch_decode(self) -> dict[str, Any]:
        """Keyword arguments of `xqa_batch_decode_with_kv_cache`.

        Raises:
            ValueError: the kernel is trtllm-gen.
        """
        if self.kernel != XQA:
            raise ValueError(f"the kernel is {self.kernel}; use the arguments of trtllm_batch_decode()")
        call = self._common() | {"q_len_per_req": self.max_q_len, "mask": self.mask}
        # Releases before 0.6.16 lack this parameter; with them no batch is ragged, see `TrtllmShape.ragged`.
        return call if self.cum_seq_lens_q is None else call | {"q_cu_seq_lens": self.cum_seq_lens_q}

    def _common(self) -> dict[str, Any]:
        return {
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": self.max_seq_len,
            "window_left": self.window_left,
            "kv_layout": self.kv_layout,
        }


@dataclass(frozen=True, slots=True)
class TrtllmContextArguments:
    """The prefilled requests, in the terms of `trtllm_batch_context_with_kv_cache`."""

    tokens: slice
    """Tokens of query and output that belong to these requests."""
    block_tables: torch.Tensor
    """(requests, pages) int32, device, contiguous."""
    seq_lens: torch.Tensor
    """(requests,) int32, device: exact number of keys of each request."""
    max_q_len: int
    max_kv_len: int
    """Upper bound of `seq_lens`."""
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    """(requests + 1,) int32, device: cumulative query lengths."""
    cum_seq_lens_kv: torch.Tensor
    """(requests + 1,) int32, device: cumulative pages of the requests, summed on the device."""
    window_left: int
    kv_layout: str

    def trtllm_batch_context(self) -> dict[str, Any]:
        """Keyword arguments of `trtllm_batch_context_with_kv_cache`."""
        return {
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_q_len": self.max_q_len,
            "max_kv_len": self.max_kv_len,
            "batch_size": self.batch_size,
            "cum_seq_lens_q": self.cum_seq_lens_q,
            "cum_seq_lens_kv": self.cum_seq_lens_kv,
            "window_left": self.window_left,
            "kv_layout": self.kv_layout,
        }


@dataclass(frozen=True, slots=True)
class TrtllmArguments:
    """A batch split as in vLLM, decodes first; a part without query tokens is None."""

    decode: TrtllmDecodeArguments | None
    context: TrtllmContextArguments | None
    """The prefills, if the kernel is trtllm-gen."""
    planned: CommonAttentionMetadata | None
    """The prefills, if the kernel is XQA, which has no prefill kernel: a batch for FlashInfer's planned wrappers."""


class TrtllmAdapter:
    """Arguments for FlashInfer's trtllm-gen and XQA.

    vLLM has no backend of this name: it uses both kernels under `--attention-backend FLASHINFER`, with
    `use_trtllm_attention`. The adapter's name joins the two, because FLASHINFER also means the planned wrappers.

    Args:
        shape: the values that do not change from step to step; the shape's constructor has checked them.
    """

    name = "FLASHINFER_TRTLLM"

    def __init__(self, shape: TrtllmShape) -> None:
        self.shape = shape
        # With XQA, planned wrappers run the prefills, and their batch takes its `max_seq_len` from the upper bounds.
        self.host_need = HostNeed.NONE if shape.kernel == TRTLLM_GEN else HostNeed.UPPER_BOUND
        self._window_left = -1 if shape.sliding_window is None else shape.sliding_window - 1
        self._uniform_masks: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    def arguments(self, metadata: CommonAttentionMetadata) -> TrtllmArguments:
        """The arguments for this batch. Padding rows and tokens are cut off, or are requests of length 0.

        Leading requests with at most `shape.query_tokens` query tokens are decoded. If XQA takes no ragged batch,
        decoding stops at the first request whose query length differs from that of request 0.

        Raises:
            ValueError: the batch is not causal, or a tensor is not contiguous.
        """
        _check(metadata)
        starts = metadata.query_start_loc_cpu.numpy()
        query_lens = np.diff(starts)
        few = query_lens <= self.shape.query_tokens
        boundary = len(few) if few.all() else int(few.argmin())
        decode, boundary = self._decode(metadata, starts, query_lens[:boundary])
        stop = boundary + _behind_last(query_lens[boundary:])
        if stop == boundary:
            return TrtllmArguments(decode, None, None)
        if self.shape.kernel == XQA:
            return TrtllmArguments(decode, None, metadata.slice_requests(boundary, stop))
        return TrtllmArguments(decode, self._context(metadata, starts, query_lens, boundary, stop), None)

    def _decode(
        self, metadata: CommonAttentionMetadata, starts: np.ndarray[Any, Any], query_lens: np.ndarray[Any, Any]
    ) -> tuple[TrtllmDecodeArguments | None, int]:
        """Arguments of the decoded requests, and the index of the first request that is not decoded."""
        boundary, live = len(query_lens), _behind_last(query_lens)
        if live == 0:
            return None, boundary
        most = int(query_lens.max())
        uniform = bool((query_lens[:live] == most).all())
        if not uniform and not self.shape.ragged:
            most, uniform = int(query_lens[0]), True
            live = boundary = int((query_lens != most).argmax()) if most else 0
            if live == 0:
                return None, 0
        if self.shape.kernel == XQA and self.shape.ragged and not (uniform and most in (1, self.shape.query_tokens)):
            # XQA is compiled for each width. All ragged batches share one width, which must be at least 2.
            uniform, most = False, max(self.shape.query_tokens, 2)
        rows, tokens = live, int(starts[live])
        if uniform and boundary == metadata.num_reqs and metadata.num_actual_tokens == boundary * most:
            # Padded for a CUDA graph: each padding row has query tokens too.
            rows, tokens = boundary, metadata.num_actual_tokens
        cumulative = None if uniform else metadata.query_start_loc[: rows + 1]
        mask = None
        if self.shape.kernel == XQA and cumulative is not None:
            mask = causal_draft_masks(_positions(cumulative, tokens), most)
        elif self.shape.kernel == XQA and most > 1:
            mask = self._uniform_mask(metadata.seq_lens.device, rows, most)
        return TrtllmDecodeArguments(
            kernel=self.shape.kernel,
            tokens=slice(0, tokens),
            block_tables=metadata.block_table_tensor[:rows],
            seq_lens=metadata.seq_lens[:rows],
            max_seq_len=metadata.max_seq_len,
            max_q_len=most,
            cum_seq_lens_q=cumulative,
            mask=mask,
            window_left=self._window_left,
            kv_layout=self.shape.kv_layout,
        ), boundary

    def _context(
        self,
        metadata: CommonAttentionMetadata,
        starts: np.ndarray[Any, Any],
        query_lens: np.ndarray[Any, Any],
        first: int,
        stop: int,
    ) -> TrtllmContextArguments:
        tokens = slice(int(starts[first]), int(starts[stop]))
        seq_lens, starts_of = metadata.seq_lens[first:stop], metadata.query_start_loc[first : stop + 1]
        pages = (seq_lens + self.shape.page_size - 1) // self.shape.page_size
        return TrtllmContextArguments(
            tokens=tokens,
            block_tables=metadata.block_table_tensor[first:stop],
            seq_lens=seq_lens,
            max_q_len=int(query_lens[first:stop].max()),
            max_kv_len=metadata.max_seq_len,
            batch_size=stop - first,
            cum_seq_lens_q=starts_of - tokens.start if first else starts_of,
            # Pages, as in vLLM and in FlashInfer's tests and benchmarks, although FlashInfer's docstring says lengths.
            # `pad` makes the leading zero, because a host scalar would be copied to the device.
            cum_seq_lens_kv=pad(pages.cumsum(0, dtype=torch.int32), (1, 0)),
            window_left=self._window_left,
            kv_layout=self.shape.kv_layout,
        )

    def _uniform_mask(self, device: torch.device, rows: int, width: int) -> torch.Tensor:
        """(rows, width, words) uint16, kept for each power of two: a CUDA graph may hold the address."""
        key = (device, 1 << (rows - 1).bit_length(), width)
        if key not in self._uniform_masks:
            mask = causal_draft_masks(torch.arange(width, device=device), width)
            self._uniform_masks[key] = mask.expand(key[1], -1, -1).contiguous()
        return self._uniform_masks[key][:rows]


def causal_draft_masks(positions: torch.Tensor, width: int) -> torch.Tensor:
    """XQA's mask: the query tokens of its own request that each query token sees, itself included.

    Args:
        positions: (tokens,) integer: index of each query token in its request.
        width: query tokens of a request that the kernel was compiled for; gives the number of words in a row.

    Returns:
        (tokens, words) uint16, on the device of `positions`, with two words for 32 query tokens: bit `j % 16` of word
        `j // 16` is token `j`. Source: flashinfer-python, `xqa.py`.
    """
    first = torch.arange(0, width, 32, device=positions.device)
    seen = (positions[:, None] + 1 - first).clamp(0, 32)
    return ((1 << seen) - 1).to(torch.int32).view(torch.uint16)


def bmm_scales(
    softmax_scale: float,
    *,
    query: float | torch.Tensor = 1.0,
    key: float | torch.Tensor = 1.0,
    value: float | torch.Tensor = 1.0,
) -> dict[str, float | torch.Tensor]:
    """A layer's `bmm1_scale` and `bmm2_scale`, keyword arguments of all three functions.

    Args:
        softmax_scale: factor on the logits, 1 / sqrt(head size) for example.
        query: dequantisation factor of the query, if the query is fp8.
        key: the same for the KV cache's keys.
        value: the same for its values.

    Returns:
        Floats, or one-element float32 device tensors where such a tensor was given, without a copy to the host.

    Raises:
        ValueError: a scale is neither a float nor a one-element float32 tensor.
    """
    for name, scale in {"softmax_scale": softmax_scale, "query": query, "key": key, "value": value}.items():
        if isinstance(scale, torch.Tensor):
            if scale.dtype != torch.float32 or scale.numel() != 1:
                raise ValueError(
                    f"{name} is {scale.dtype} of shape {tuple(scale.shape)}; it must be a float, or a float32 tensor "
                    "of one element"
                )
        elif not isinstance(scale, float):
            raise ValueError(f"{name} is {scale!r}; it must be a float, or a float32 tensor of one element")
    return {"bmm1_scale": softmax_scale * query * key, "bmm2_scale": value}


def _check(metadata: CommonAttentionMetadata) -> None:
    if not metadata.causal:
        raise ValueError("the batch is not causal; trtllm-gen and XQA decode causally, so use FLASH_ATTN")
    for name in ("block_table_tensor", "seq_lens"):
        tensor = getattr(metadata, name)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; the kernels read it as one "
                f"block, so give {name}.contiguous()"
            )


def _behind_last(query_lens: np.ndarray[Any, Any]) -> int:
    """Number of requests up to and including the last with a query token."""
    live = np.flatnonzero(query_lens)
    return int(live[-1]) + 1 if len(live) else 0


def _positions(cumulative: torch.Tensor, tokens: int) -> torch.Tensor:
    """(tokens,) int32: index of each query token in its request, from (requests + 1,) cumulative query lengths."""
    token = torch.arange(tokens, dtype=torch.int32, device=cumulative.device)
    request = torch.searchsorted(cumulative[1:], token, right=True, out_int32=True)
    return token - cumulative.index_select(0, request)
