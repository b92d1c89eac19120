"""The shapes that trtllm-gen and XQA take and refuse, and which of them a machine and its FlashInfer have."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trtllm_contract
from trtllm_shapes import NEW, OLD, SM90, SM100

from vllm_async_spec.attention import (
    FlashInferFeatures,
    TrtllmAdapter,
    TrtllmShape,
    UnsupportedShapeError,
    decode_kernel,
)

SM120 = replace(SM90, capability=(12, 0))
TAKEN = [
    SM100,
    replace(SM100, capability=(10, 3), page_size=1024),
    replace(SM100, query_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn, head_size=64, sliding_window=128),
    replace(SM100, num_heads=128, num_kv_heads=1, page_size=64, features=OLD),
    SM90,
    SM120,
    replace(SM120, page_size=128, kv_dtype=torch.float8_e4m3fn, query_dtype=torch.float16),
    replace(SM90, head_size=16, num_heads=128, num_kv_heads=1),
    replace(SM90, head_size=256, num_heads=32, num_kv_heads=1),
    replace(SM90, features=OLD),
    replace(SM90, features=OLD, query_tokens=1, sliding_window=64),
    replace(SM90, sliding_window=64, kv_layout="NHD"),
]


def test_shapes_that_kernels_take():
    for shape in TAKEN:
        assert TrtllmAdapter(shape).shape is shape


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (SM100, {"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        (SM100, {"query_tokens": 0}, "query_tokens is 0; it must be at least 1"),
        (SM100, {"sliding_window": 0}, "sliding_window is 0; it must be at least 1, or None for no window"),
        (SM100, {"kv_layout": "HDN"}, "kv_layout is HDN; it must be HND or NHD"),
        (SM100, {"kernel": "cudnn"}, "kernel is cudnn; it must be trtllm-gen or xqa"),
        (
            SM100,
            {"num_heads": 30},
            "num_heads is 30; it must be a multiple of num_kv_heads, 8, .* tensor-parallel size",
        ),
        (SM100, {"capability": (9, 0)}, r"capability is 9.0; trtllm-gen takes 10.0 or 10.3, so use xqa"),
        (SM100, {"head_size": 80}, "head_size is 80; trtllm-gen takes 64, 128 or 256, so use .* FLASH_ATTN"),
        (SM100, {"page_size": 24}, "page_size is 24; trtllm-gen takes 16, 32 or 64, so use --block-size 64"),
        (SM100, {"page_size": 192}, "page_size is 192; trtllm-gen takes 16, 32 or 64, so use --block-size 64"),
        (SM100, {"page_size": 128, "features": OLD}, "page_size is 128; this FlashInfer's .* 0.6.12 or later"),
        (SM100, {"page_size": 128, "num_kv_heads": 32}, "page_size is 128 with one query head for each KV head"),
        (SM100, {"kv_dtype": torch.float8_e5m2}, "kv_dtype is torch.float8_e5m2; trtllm-gen takes .* --kv-cache-dtype"),
        (SM100, {"kv_dtype": torch.uint8}, "kv_dtype is torch.uint8; trtllm-gen takes"),
        (
            SM100,
            {"kv_dtype": torch.float8_e4m3fn},
            "query_dtype is torch.bfloat16 over a KV cache of torch.float8_e4m3fn; trtllm-gen has no kernel for such",
        ),
        (
            SM100,
            {"num_heads": 256, "num_kv_heads": 1},
            "the GQA group size is 256, 256 heads over 1 KV heads; .* at most 128",
        ),
        (SM90, {"capability": (8, 9)}, "capability is 8.9; xqa takes 9.0, 10.x and 12.x"),
        (SM90, {"page_size": 256}, "page_size is 256; xqa takes 16, 32, 64 or 128, so use --block-size 64"),
        (
            SM90,
            {"query_dtype": torch.float8_e4m3fn},
            "query_dtype is torch.float8_e4m3fn; xqa takes .* do not quantise",
        ),
        (
            SM90,
            {"kv_dtype": torch.float16},
            "kv_dtype is torch.float16; xqa takes torch.bfloat16 or torch.float8_e4m3fn",
        ),
        (SM90, {"kv_dtype": torch.float8_e5m2}, "kv_dtype is torch.float8_e5m2; xqa takes"),
        (SM90, {"head_size": 72}, "head_size is 72; xqa takes multiples of 16 up to 256"),
        (SM90, {"head_size": 512}, "head_size is 512; xqa takes multiples of 16 up to 256"),
        (SM90, {"num_heads": 65, "num_kv_heads": 1}, "group size is 65, .*; xqa takes at most 64 at head size 128"),
        (
            SM90,
            {"sliding_window": 64, "features": OLD},
            "sliding_window is 64 with 4 query tokens a request; .* single tokens only, .* 0.6.16 or later",
        ),
    ],
)
def test_a_shape_that_no_kernel_takes_is_refused_by_name(shape: TrtllmShape, changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedShapeError, match=message):
        replace(shape, **changes)


@pytest.mark.parametrize(
    ("capability", "kernel"), [((9, 0), "xqa"), ((10, 0), "trtllm-gen"), ((10, 3), "trtllm-gen"), ((12, 1), "xqa")]
)
def test_which_kernel_decodes(capability: tuple[int, int], kernel: str):
    assert decode_kernel(capability) == kernel


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 7), (11, 0)])
def test_a_machine_with_neither_kernel_is_told(capability: tuple[int, int]):
    name = f"{capability[0]}.{capability[1]}"
    with pytest.raises(UnsupportedShapeError, match=f"compute capability {name} has neither .* FLASH_ATTN"):
        decode_kernel(capability)


@pytest.mark.parametrize("new", [True, False])
def test_what_flashinfer_has_is_asked_of_its_signature_and_its_sources(
    new: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    names = ["flashinfer", "flashinfer.decode", "flashinfer.jit", "flashinfer.jit.env"]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["flashinfer.jit"].env = modules["flashinfer.jit.env"]
    function: Callable[..., Any] = trtllm_contract.xqa_batch_decode_with_kv_cache
    if not new:
        function = trtllm_contract.xqa_batch_decode_with_kv_cache_before_0_6_16
    modules["flashinfer.decode"].xqa_batch_decode_with_kv_cache = function
    modules["flashinfer.jit.env"].FLASHINFER_INCLUDE_DIR = tmp_path
    header = tmp_path / "flashinfer" / "trtllm" / "fmha" / "fmhaKernels.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("static constexpr int kDynamicNumTokensPerPageThreshold = 128;" if new else "int x;")
    assert FlashInferFeatures.installed() == (NEW if new else OLD)
