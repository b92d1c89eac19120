"""The attention backends of a batcher: an adapter each, and the kernels that take its arguments.

A batch of decodes has as many tokens in each row, rows of padding included: one, or with drafts a few. A batch of
prefills has no padding, and all its lengths are known on the host.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from vllm_async_spec.attention import (
    FlashAttentionAdapter,
    ReferenceAdapter,
    UnsupportedShapeError,
    paged_attention,
)
from vllm_async_spec.generation.batching.attention_function import Attend
from vllm_async_spec.generation.batching.paged_cache import LayerShape
from vllm_async_spec.generation.batching.step_slots import PrefillInputs
from vllm_async_spec.metadata import CommonAttentionMetadata


class AttentionChoiceError(ValueError):
    """The attention that was asked for can't be had; the message says why, and what can."""


class SlowAttentionWarning(UserWarning):
    """A CUDA device attends by the reference in plain PyTorch: right, and slow."""


class AttentionBackend(Protocol):
    """One way to attend."""

    name: str
    """The adapter's."""

    def decode(self, metadata: CommonAttentionMetadata) -> Attend:
        """How a batch of decodes attends; may be captured in a CUDA graph."""
        ...

    def prefill(self, metadata: CommonAttentionMetadata, host: PrefillInputs, device: PrefillInputs) -> Attend:
        """How a batch of prompts attends; never captured.

        Args:
            metadata: the batch.
            host: the same rows' inputs on the host.
            device: and on the device.
        """
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
        AttentionChoiceError: the page size or the dtype is not one that flash-attn takes.
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
    """Tokens in a page where none is asked for: what the backend that will be chosen takes."""
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
    """The backend of that name; of `auto`, the fastest that this machine has and that takes this model's shape.

    Args:
        attention: the name.
        layers: shapes of the model's layers.
        page_size: tokens in a page.
        slots: steps that may be planned before the first of them has run.
        device: of the model.
        query_tokens: tokens of a row that is decoded, at most.

    Raises:
        AttentionChoiceError: there is no such name, or the backend can't be had for this machine or shape.
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
        raise AttentionChoiceError(f"{name} does not take this model: {error}") from error
    return backend


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
