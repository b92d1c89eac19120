"""Shapes that FlashInfer's trtllm-gen and XQA kernels take, checked early so that none stops a running engine.

trtllm-gen is a set of compiled kernels, so the list of the set gives its rules: `flashInferMetaInfo.h` of
flashinfer-cubin 0.6.6 and 0.6.13. XQA is compiled for the shape, so its sources give its rules. Both were read in
flashinfer-python 0.6.6, 0.6.14 and 0.7.0.post1. Where these differ, the installed release's features decide, not its
version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

TRTLLM_GEN = "trtllm-gen"
XQA = "xqa"

_XQA_TILE_BYTES = 16 << 10


class UnsupportedShapeError(ValueError):
    """No kernel takes this shape: the message names the value, and what to do."""


@dataclass(frozen=True, slots=True)
class FlashInferFeatures:
    """Features that only some releases of flashinfer-python have."""

    ragged_xqa: bool
    """XQA takes ragged batches, and applies a window to each of several query tokens. Both since 0.6.16."""
    large_pages: bool
    """trtllm-gen takes pages of 128 tokens and more. Since 0.6.12."""

    @classmethod
    def installed(cls) -> FlashInferFeatures:
        """Features of the installed FlashInfer.

        Raises:
            ImportError: FlashInfer is not installed.
        """
        from flashinfer.decode import xqa_batch_decode_with_kv_cache
        from flashinfer.jit import env

        selection = env.FLASHINFER_INCLUDE_DIR / "flashinfer" / "trtllm" / "fmha" / "fmhaKernels.cuh"
        return cls(
            ragged_xqa=takes_ragged(xqa_batch_decode_with_kv_cache),
            large_pages="kDynamicNumTokensPerPageThreshold" in selection.read_text(encoding="utf-8"),
        )


def takes_ragged(xqa_batch_decode_with_kv_cache: Callable[..., Any]) -> bool:
    """Whether this FlashInfer function takes requests with different numbers of query tokens."""
    return "q_cu_seq_lens" in inspect.signature(xqa_batch_decode_with_kv_cache).parameters


def decode_kernel(capability: tuple[int, int]) -> str:
    """FlashInfer's decode kernel for this compute capability, as `backend="auto"` chooses.

    Raises:
        UnsupportedShapeError: neither kernel runs on this compute capability.
    """
    if capability in ((10, 0), (10, 3)):
        return TRTLLM_GEN
    if capability == (9, 0) or capability[0] == 12:
        return XQA
    raise UnsupportedShapeError(
        f"compute capability {_words(capability)} has neither trtllm-gen (10.0, 10.3) nor XQA (9.0, 12.x); "
        "use FlashInfer's planned wrappers or FLASH_ATTN"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmShape:
    """The values that do not change from step to step; the constructor checks them.

    Raises:
        UnsupportedShapeError: the kernel does not take this shape.
    """

    kernel: str
    """`trtllm-gen` or `xqa`; see `decode_kernel`."""
    capability: tuple[int, int]
    """Compute capability of the device."""
    page_size: int
    """Tokens in a page."""
    head_size: int
    num_heads: int
    num_kv_heads: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    query_tokens: int = 1
    """Most query tokens of a decoded request: its drafts plus one."""
    sliding_window: int | None = None
    """How many tokens back, itself included, a token sees; all if None."""
    kv_layout: str = "HND"
    """Layout of the KV cache, `HND` or `NHD`. Always passed, because the functions' defaults differ."""
    features: FlashInferFeatures = field(default_factory=FlashInferFeatures.installed)
    """Features of the FlashInfer that will run; by default the installed one."""

    def __post_init__(self) -> None:
        for name in ("page_size", "head_size", "num_heads", "num_kv_heads", "query_tokens"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.sliding_window is not None:
            _need(self.sliding_window >= 1, "sliding_window", self.sliding_window, "at least 1, or None for no window")
        _need(self.kv_layout in ("HND", "NHD"), "kv_layout", self.kv_layout, "HND or NHD")
        _need(self.kernel in (TRTLLM_GEN, XQA), "kernel", self.kernel, f"{TRTLLM_GEN} or {XQA}")
        # trtllm_paged_attention_launcher in csrc/trtllm_fmha_kernel_launcher.cu; head_group_ratio in xqa.py.
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedShapeError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, {self.num_kv_heads}, so choose "
                "a tensor-parallel size that divides both"
            )
        (self._check_trtllm_gen if self.kernel == TRTLLM_GEN else self._check_xqa)()

    @property
    def ragged(self) -> bool:
        """Whether one call decodes requests with different numbers of query tokens."""
        return self.kernel == TRTLLM_GEN or self.features.ragged_xqa

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def _check_trtllm_gen(self) -> None:
        # Source: constructor of TllmGenFmhaRunner, fmhaRunner.cuh. 0.7.0 adds 10.7, which this package lacks.
        self._one_of("capability", self.capability, ((10, 0), (10, 3)), f"use {XQA} (9.0, 12.x) or FLASH_ATTN")
        # Source: mHeadDimQk of paged kernels in both flashInferMetaInfo.h, for every dtype, page size and mask.
        self._one_of("head_size", self.head_size, (64, 128, 256), _OTHERWISE)
        self._one_of("kv_dtype", self.kv_dtype, (torch.bfloat16, torch.float16, torch.float8_e4m3fn), _CACHE)
        # Same source: both have 16-bit queries over an fp8 cache for decoding, and neither for prefills.
        if self.query_dtype != self.kv_dtype:
            raise UnsupportedShapeError(
                f"query_dtype is {self.query_dtype} over a KV cache of {self.kv_dtype}; {TRTLLM_GEN} has no kernel for "
                "such prefills, so quantise both, as vLLM does without disable_flashinfer_q_quantization, or neither"
            )
        # 16, 32 and 64 have kernels of their own; powers of two from 128 need kernels that read the size at run time.
        large = self.page_size >= 128 and self.page_size & (self.page_size - 1) == 0
        if large and self.features.large_pages:
            # vLLM's get_supported_kernel_block_sizes offers such pages for grouped heads only.
            if self._group == 1:
                raise UnsupportedShapeError(
                    f"page_size is {self.page_size} with one query head for each KV head; {TRTLLM_GEN} takes such "
                    "pages for grouped heads only, so use --block-size 64"
                )
        elif large:
            raise UnsupportedShapeError(
                f"page_size is {self.page_size}; this FlashInfer's {TRTLLM_GEN} takes 16, 32 and 64, so use "
                "--block-size 64 or flashinfer-python 0.6.12 or later"
            )
        else:
            self._one_of("page_size", self.page_size, (16, 32, 64), "use --block-size 64")
        # computeCtaAndClusterConfig in fmhaKernels.cuh: a block has at most 128 rows and holds a whole GQA group.
        if self._group > 128:
            raise UnsupportedShapeError(
                f"the GQA group size is {self._group}, {self.num_heads} heads over {self.num_kv_heads} KV heads; "
                f"{TRTLLM_GEN} takes at most 128, so {_OTHERWISE}"
            )

    def _check_xqa(self) -> None:
        # xqa() in xqa.py: "XQA is only supported on SM90, SM100, SM120/SM121 GPUs".
        if self.capability[0] not in (9, 10, 12):
            raise UnsupportedShapeError(
                f"capability is {_words(self.capability)}; {XQA} takes 9.0, 10.x and 12.x, so {_OTHERWISE}"
            )
        # Source of the next four checks: gen_xqa_module in jit/xqa.py, which treats unknown dtypes as 16-bit.
        self._one_of("page_size", self.page_size, (16, 32, 64, 128), "use --block-size 64")
        self._one_of("query_dtype", self.query_dtype, (torch.bfloat16, torch.float16), "do not quantise the query")
        self._one_of("kv_dtype", self.kv_dtype, (self.query_dtype, torch.float8_e4m3fn), _CACHE)
        # All releases take up to 256. 0.7.0 takes 512 for single tokens, which neither vLLM nor this package uses.
        if self.head_size % 16 or self.head_size > 256:
            raise UnsupportedShapeError(
                f"head_size is {self.head_size}; {XQA} takes multiples of 16 up to 256, so {_OTHERWISE}"
            )
        # static_assert(persistentQ) in csrc/xqa/mha.cu, for one query token: one tile holds a whole GQA group.
        padded = next(size for size in (64, 128, 256) if size >= self.head_size)
        most = _XQA_TILE_BYTES // (2 * padded)
        if self._group > most:
            raise UnsupportedShapeError(
                f"the GQA group size is {self._group}, {self.num_heads} heads over {self.num_kv_heads} KV heads; "
                f"{XQA} takes at most {most} at head size {self.head_size}, so {_OTHERWISE}"
            )
        # Unless jit/xqa.py sets IS_SPEC_DEC_TREE=0, csrc/xqa/mha.cu applies the window by tile, not by query token.
        if self.sliding_window is not None and self.query_tokens > 1 and not self.features.ragged_xqa:
            raise UnsupportedShapeError(
                f"sliding_window is {self.sliding_window} with {self.query_tokens} query tokens a request; this "
                f"FlashInfer's {XQA} applies a window to single tokens only, so use flashinfer-python 0.6.16 or later, "
                "or no drafts"
            )

    def _one_of(self, name: str, value: object, allowed: tuple[object, ...], remedy: str) -> None:
        if value not in allowed:
            *most, last = map(_words, allowed)
            these = f"{', '.join(most)} or {last}" if most else last
            raise UnsupportedShapeError(f"{name} is {_words(value)}; {self.kernel} takes {these}, so {remedy}")


_OTHERWISE = "use FlashInfer's planned wrappers (--attention-config.use_trtllm_attention=false) or FLASH_ATTN"


_CACHE = "use --kv-cache-dtype auto or fp8_e4m3"


def _need(right: bool, name: str, value: object, must: str) -> None:
    if not right:
        raise UnsupportedShapeError(f"{name} is {value}; it must be {must}")


def _words(value: object) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)
