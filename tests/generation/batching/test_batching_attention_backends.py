"""The attention backends of continuous batching on a CPU, on stand-ins that hold each call to its contract."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_contract
import pytest
import tiny_models
import torch
import trtllm_contract
from small_batchers import LENGTH, PROMPTS, generated, make, submit_all
from test_batching_drafts import drafter

from vllm_async_spec.attention import TrtllmShape
from vllm_async_spec.generation.batching import batcher as batcher_module
from vllm_async_spec.generation.batching.attention_backends import (
    AttentionChoiceError,
    FlashAttentionBackend,
    choose_backend,
)
from vllm_async_spec.generation.batching.flashinfer_backend import FlashInferBackend
from vllm_async_spec.generation.batching.paged_cache import LayerShape


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` of flashinfer-python 0.6.14, which knows what it was planned with."""

    planned = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._own = self._pin_memory_int_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        type(self).planned += 1
        assert causal
        assert self._pin_memory_int_workspace_buffer is not self._own, "a plan may overwrite one that is being copied"
        rows = qo_indptr.shape[0] - 1
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert paged_kv_indptr.shape == (rows + 1,)
        assert paged_kv_last_page_len.shape == (rows,)
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._starts, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self._page_size, self._scale, self._window = page_size, sm_scale, window_left

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.is_contiguous()
        assert (q.shape[1], paged_kv_cache[0].shape[2], q.shape[2]) == self._heads
        assert q.shape[0] == self._starts[-1]
        out = torch.full_like(q, torch.nan)
        for row, last in enumerate(self._last):
            pages = self._indices[self._pages[row] : self._pages[row + 1]]
            length = (len(pages) - 1) * self._page_size + last
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in paged_kv_cache)
            tokens = slice(self._starts[row], self._starts[row + 1])
            at = torch.arange(length - (tokens.stop - tokens.start), length)[:, None]
            sees = torch.arange(length) <= at
            if self._window >= 0:
                sees &= torch.arange(length) >= at - self._window
            out[tokens] = torch.nn.functional.scaled_dot_product_attention(
                q[tokens].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=sees,
                scale=self._scale,
                enable_gqa=True,
            ).transpose(0, 1)
        return out


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.jit", "flashinfer.jit.env"]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"):
        setattr(modules["flashinfer.decode"], name, getattr(trtllm_contract, name))
    modules["flashinfer.prefill"].BatchPrefillWithPagedKVCacheWrapper = Wrapper
    modules["flashinfer.jit"].env = modules["flashinfer.jit.env"]
    modules["flashinfer.jit.env"].FLASHINFER_INCLUDE_DIR = tmp_path
    header = tmp_path / "flashinfer" / "trtllm" / "fmha" / "fmhaKernels.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("int x;")
    monkeypatch.setattr(TrtllmShape, "_check_xqa", lambda self: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        batcher_module,
        "choose_backend",
        lambda _, layers, *, page_size, slots, device, query_tokens: FlashInferBackend(
            layers, page_size, slots, device, query_tokens
        ),
    )


def scaled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The contract's function, which scales as flash-attn does where it is not told."""

    def with_scale(query: torch.Tensor, *args: Any, softmax_scale: float, **kwargs: Any) -> torch.Tensor:
        assert softmax_scale == query.shape[-1] ** -0.5
        return function(query, *args, **kwargs)

    return with_scale


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flash_attn")
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(module, name, scaled(getattr(kernel_contract, name)))
    monkeypatch.setitem(sys.modules, "flash_attn", module)

    def choose(_: str, layers: Any, *, page_size: int, **__: Any) -> FlashAttentionBackend:
        return FlashAttentionBackend([dataclasses.replace(each, dtype=torch.bfloat16) for each in layers], page_size)

    monkeypatch.setattr(batcher_module, "choose_backend", choose)


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize(("installed", "page_size"), [("flashinfer", 16), ("flash_attn", 256)])
def test_the_tokens_are_those_of_generate(installed: str, page_size: int, kind: str, request: pytest.FixtureRequest):
    expected = [generated(kind, prompt, 12) for prompt in PROMPTS]
    request.getfixturevalue(installed)
    before = Wrapper.planned
    with make(kind, page_size=page_size) as batcher:
        found = submit_all(batcher, 12)
        batcher.run()
    assert [each.result() for each in found] == expected
    assert (Wrapper.planned > before) == (installed == "flashinfer")


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize(("installed", "page_size"), [("flashinfer", 16), ("flash_attn", 256)])
@pytest.mark.parametrize("drafts", [1, 2])
def test_with_drafts_the_tokens_are_those_of_generate(
    drafts: int, installed: str, page_size: int, kind: str, request: pytest.FixtureRequest
):
    request.getfixturevalue(installed)
    copied, new_tokens = drafter(kind, "the same"), 1 + 2 * (1 + drafts)
    with make(kind, page_size=page_size, draft_model=copied, draft_tokens=drafts, eos_token_id=[]) as batcher:
        found = [batcher.submit(prompt, max_new_tokens=new_tokens) for prompt in PROMPTS[:4]]
        batcher.run()
        assert batcher.accepted == 1 + drafts
    assert [each.result() for each in found] == [generated(kind, prompt, new_tokens, ()) for prompt in PROMPTS[:4]]


SHAPE = LayerShape(num_heads=2, num_kv_heads=2, head_size=8, dtype=torch.float32, scale=1.0, sliding_window=None)


@pytest.mark.parametrize(
    ("page_size", "dtype", "message"),
    [
        (64, torch.bfloat16, "page_size is 64; flash-attn takes multiples of 256"),
        (256, torch.float32, r"the model's dtype is torch.float32; flash-attn takes torch.float16 and torch.bfloat16"),
    ],
)
def test_what_flash_attn_does_not_take_is_refused(page_size: int, dtype: torch.dtype, message: str):
    with pytest.raises(AttentionChoiceError, match=message):
        FlashAttentionBackend([dataclasses.replace(SHAPE, dtype=dtype)], page_size)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    device = torch.device("cuda", 0)
    with pytest.raises(AttentionChoiceError, match="FLASH_ATTN needs flash_attn, which is not installed"):
        choose_backend("FLASH_ATTN", [SHAPE], page_size=256, slots=2, device=device)
    with pytest.warns(UserWarning, match="attention is TORCH_REFERENCE, which is slow: FLASH_ATTN needs flash_attn"):
        assert choose_backend("auto", [SHAPE], page_size=64, slots=2, device=device).name == "TORCH_REFERENCE"


def test_a_batcher_on_a_cpu_attends_by_the_reference():
    with make(max_length=LENGTH) as batcher:
        assert batcher.attention == "TORCH_REFERENCE"
    assert tiny_models.model("llama").config._attn_implementation == "eager"
