"""The attention backends of a batcher: each joins an adapter to the kernels that take its arguments.

In a batch of decodes, each row has the same number of tokens, padding rows included: one, or a few with drafts. A batch
of prefills has no padding, and the host knows all its lengths.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from vllm_async_spec.attention import FlashAttentionAdapter, ReferenceAdapter, UnsupportedShapeError, paged_attention
from vllm_async_spec.generation.batching.attention_function import Attend
from vllm_async_spec.generation.batching.paged_cache import LayerShape
from vllm_async_spec.generation.batching.step_slots import PrefillInputs
from vllm_async_spec.metadata import CommonAttentionMetadata


class AttentionChoiceError(ValueError):
    """The requested attention is unavailable; the message says why, and what is available."""


class SlowAttentionWarning(UserWarning):
    """On a CUDA device, attention uses the reference in plain PyTorch, which is correct but slow."""


class AttentionBackend(Protocol):
    """One attention backend, with its decode and prefill kernels."""

    name: str
    """Name of the adapter."""

    def decode(self, metadata: CommonAttentionMetadata) -> Attend:
        """The attention function for a batch of decodes; may be captured in a CUDA graph."""
        ...

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, device: PrefillInputs) -> Attend:
        """The attention function for a batch of prompts; never captured. `host` and `device` hold the same inputs."""
        ...


class ReferenceBackend:
    """`paged_attention` in plain PyTorch, on any device."""

    name = ReferenceAdapter.name

    def decode(self, metadata: CommonAttentionMetadata) -> Attend:
        """See `AttentionBackend`."""
        arguments = ReferenceAdapter().arguments(metadata)

        def attend(layer: LayerShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return paged_attention(
                query, keys, values, arguments, scale=layer.scale, sliding_window=layer.sliding_window
            )

        return attend

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, device: PrefillInputs) -> Attend:
        """See `AttentionBackend`."""
        return self.decode(metadata)


class FlashAttentionBackend:
    """flash-attn's `flash_attn_with_kvcache` for decodes and `flash_attn_varlen_func` for prompts.

    Raises:
        AttentionChoiceError: flash-attn does not take the page size or the dtype.
    """

    name = FlashAttentionAdapter.name

    def __init__(self, layers: Collection[LayerShape], page_size: int) -> None:
        if page_size % 256:
            raise AttentionChoiceError(f"page_size is {page_size}; flash-attn takes multiples of 256")
        for layer in layers:
            if layer.dtype not in (torch.float16, torch.bfloat16):
                raise AttentionChoiceError(
                    f"the model's dtype is {layer.dtype}; flash-attn takes torch.float16 and torch.bfloat16"
                )
        self._adapters = {
            window: FlashAttentionAdapter(sliding_window=window)
            for window in {layer.sliding_window for layer in layers}
        }

    def decode(self, metadata: CommonAttentionMetadata) -> Attend:
        """See `AttentionBackend`."""
        from flash_attn import flash_attn_with_kvcache

        arguments = {window: adapter.arguments(metadata).with_kvcache() for window, adapter in self._adapters.items()}

        def attend(layer: LayerShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            given = arguments[layer.sliding_window]
            rows = query.unflatten(0, (metadata.num_reqs, metadata.max_query_len))
            out: torch.Tensor = flash_attn_with_kvcache(rows, keys, values, softmax_scale=layer.scale, **given)
            return out.flatten(0, 1)

        return attend

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, device: PrefillInputs) -> Attend:
        """See `AttentionBackend`."""
        from flash_attn import flash_attn_varlen_func

        arguments = {window: adapter.arguments(metadata).varlen() for window, adapter in self._adapters.items()}

        def attend(layer: LayerShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            given = arguments[layer.sliding_window]
            out: torch.Tensor = flash_attn_varlen_func(query, keys, values, softmax_scale=layer.scale, **given)
            return out

        return attend


def default_page_size(attention: str, device: torch.device) -> int:
    """Default number of tokens in a page, which suits the backend that `choose_backend` will choose."""
    if attention == FlashAttentionBackend.name or (
        attention == "auto" and device.type == "cuda" and _has("flash_attn")
    ):
        return 256
    return 16 if device.type == "cpu" else 64


def choose_backend(
    attention: str,
    layers: Collection[LayerShape],
    *,
    page_size: int,
    slots: int,
    device: torch.device,
    query_tokens: int = 1,
) -> AttentionBackend:
    """The backend named `attention`; for `auto`, the fastest that this machine has and the shapes of the layers allow.

    Other arguments are those of `FlashInferBackend`.

    Raises:
        AttentionChoiceError: the name is unknown, or the backend does not support this machine or shape.
    """

    def flashinfer() -> AttentionBackend:
        from vllm_async_spec.generation.batching.flashinfer_backend import FlashInferBackend

        return FlashInferBackend(layers, page_size, slots, device, query_tokens)

    makers: dict[str, tuple[str | None, Callable[[], AttentionBackend]]] = {
        "FLASH_ATTN": ("flash_attn", lambda: FlashAttentionBackend(layers, page_size)),
        "FLASHINFER_TRTLLM": ("flashinfer", flashinfer),
        "TORCH_REFERENCE": (None, ReferenceBackend),
    }
    if attention != "auto":
        if attention not in makers:
            raise AttentionChoiceError(f"attention is {attention!r}; it must be auto, {', '.join(makers)}")
        return _made(attention, *makers[attention], device=device)
    reasons = []
    if device.type == "cuda":
        for name in ("FLASH_ATTN", "FLASHINFER_TRTLLM"):
            try:
                return _made(name, *makers[name], device=device)
            except AttentionChoiceError as error:
                reasons.append(str(error))
        message = f"attention is {ReferenceBackend.name}, which is slow: {'; '.join(reasons)}"
        warnings.warn(message, SlowAttentionWarning, stacklevel=4)
    return ReferenceBackend()


def _made(name: str, module: str | None, make: Callable[[], Any], *, device: torch.device) -> AttentionBackend:
    if module is not None and device.type != "cuda":
        raise AttentionChoiceError(f"{name} needs a CUDA device, and the model is on {device.type}")
    if module is not None and not _has(module):
        raise AttentionChoiceError(f"{name} needs {module}, which is not installed")
    try:
        backend: AttentionBackend = make()
    except UnsupportedShapeError as error:
        raise AttentionChoiceError(f"{name} does not support this model: {error}") from error
    return backend


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
