"""Which shapes FlashInfer's trtllm-gen and XQA kernels take, so that one that they do not stops no running engine.

trtllm-gen is a set of compiled kernels, so its rules are what is in the set: `flashInferMetaInfo.h` of flashinfer-cubin
0.6.6 and 0.6.13. XQA is compiled for the shape, so its rules are what its sources refuse. Both were read in
flashinfer-python 0.6.6, 0.6.14 and 0.7.0.post1; where these differ, what the installed one has decides, not its number.
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
    """What some releases of flashinfer-python have and others have not."""

    ragged_xqa: bool
    """XQA takes ragged batches, and a window for each of several query tokens. One change brought both: 0.6.16."""
    large_pages: bool
    """trtllm-gen takes pages of 128 tokens and more: 0.6.12."""

    @classmethod
    def installed(cls) -> FlashInferFeatures:
        """What the installed FlashInfer has.

        Raises:
            ImportError: there is none.
        """
        from flashinfer.decode import xqa_batch_decode_with_kv_cache
        from flashinfer.jit import env

        selection = env.FLASHINFER_INCLUDE_DIR / "flashinfer" / "trtllm" / "fmha" / "fmhaKernels.cuh"
        return cls(
            ragged_xqa=takes_ragged(xqa_batch_decode_with_kv_cache),
            large_pages="kDynamicNumTokensPerPageThreshold" in selection.read_text(encoding="utf-8"),
        )


def takes_ragged(xqa_batch_decode_with_kv_cache: Callable[..., Any]) -> bool:
    """Whether FlashInfer's function of this name takes requests with different numbers of query tokens."""
    return "q_cu_seq_lens" in inspect.signature(xqa_batch_decode_with_kv_cache).parameters


def decode_kernel(capability: tuple[int, int]) -> str:
    """The kernel that FlashInfer decodes with on a machine of this compute capability, as `backend="auto"` chooses.

    Raises:
        UnsupportedShapeError: there is none.
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
    """What does not change from step to step; making one is the check.

    Raises:
        UnsupportedShapeError: the kernel does not take it.
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
    """Most query tokens of a request that is decoded: the drafts and one."""
    sliding_window: int | None = None
    """How many tokens back, itself included, a token sees; all if None."""
    kv_layout: str = "HND"
    """Of the KV cache: `HND` or `NHD`. The functions' own defaults differ, so it is always said."""
    features: FlashInferFeatures = field(default_factory=FlashInferFeatures.installed)
    """Of the FlashInfer that will run; the installed one's if not given."""

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
        # The constructor of TllmGenFmhaRunner, fmhaRunner.cuh. 10.7 is new in 0.7.0, and nothing of ours knows it.
        self._one_of("capability", self.capability, ((10, 0), (10, 3)), f"use {XQA} (9.0, 12.x) or FLASH_ATTN")
        # The inventories: mHeadDimQk of paged kernels that are there in both, for every dtype, page size and mask.
        self._one_of("head_size", self.head_size, (64, 128, 256), _OTHERWISE)
        self._one_of("kv_dtype", self.kv_dtype, (torch.bfloat16, torch.float16, torch.float8_e4m3fn), _CACHE)
        # Also the inventories. Both have 16-bit queries over an fp8 cache for decoding, and neither for prefills.
        if self.query_dtype != self.kv_dtype:
            raise UnsupportedShapeError(
                f"query_dtype is {self.query_dtype} over a KV cache of {self.kv_dtype}; {TRTLLM_GEN} has no kernel for "
                "such prefills, so quantise both, as vLLM does without disable_flashinfer_q_quantization, or neither"
            )
        # 16, 32 and 64 have kernels of their own; a power of two from 128 runs on those that read the size, if there.
        large = self.page_size >= 128 and self.page_size & (self.page_size - 1) == 0
        if large and self.features.large_pages:
            # vLLM's get_supported_kernel_block_sizes offers them for grouped heads only.
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
        # computeCtaAndClusterConfig in fmhaKernels.cuh: a block has 128 rows at most, and all heads of a group.
        if self._group > 128:
            raise UnsupportedShapeError(
                f"{self.num_heads} heads over {self.num_kv_heads} KV heads are {self._group} in a group; {TRTLLM_GEN} "
                f"takes at most 128, so {_OTHERWISE}"
            )

    def _check_xqa(self) -> None:
        # xqa() in xqa.py: "XQA is only supported on SM90, SM100, SM120/SM121 GPUs".
        if self.capability[0] not in (9, 10, 12):
            raise UnsupportedShapeError(
                f"capability is {_words(self.capability)}; {XQA} takes 9.0, 10.x and 12.x, so {_OTHERWISE}"
            )
        # gen_xqa_module in jit/xqa.py, all of the next four. Dtypes that it does not know it takes for 16 bits.
        self._one_of("page_size", self.page_size, (16, 32, 64, 128), "use --block-size 64")
        self._one_of("query_dtype", self.query_dtype, (torch.bfloat16, torch.float16), "do not quantise the query")
        self._one_of("kv_dtype", self.kv_dtype, (self.query_dtype, torch.float8_e4m3fn), _CACHE)
        # Up to 256 in all; 0.7.0 goes to 512 for single tokens, which neither vLLM nor this uses.
        if self.head_size % 16 or self.head_size > 256:
            raise UnsupportedShapeError(
                f"head_size is {self.head_size}; {XQA} takes multiples of 16 up to 256, so {_OTHERWISE}"
            )
        # static_assert(persistentQ) in csrc/xqa/mha.cu, for one query token: all heads of a group are in one tile.
        padded = next(size for size in (64, 128, 256) if size >= self.head_size)
        most = _XQA_TILE_BYTES // (2 * padded)
        if self._group > most:
            raise UnsupportedShapeError(
                f"{self.num_heads} heads over {self.num_kv_heads} KV heads are {self._group} in a group; {XQA} takes "
                f"at most {most} of head size {self.head_size}, so {_OTHERWISE}"
            )
        # Without IS_SPEC_DEC_TREE=0, in jit/xqa.py, csrc/xqa/mha.cu cuts the window by tiles and not by query token.
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
