"""Attention layers that attend over the suite's batches, and the reference for their output.

A `Layer` is one attention layer with its own KV cache; `ImplLayer` runs the implementation of any backend that has one.
Slots without a token of the batch, which in an engine are free or hold rejected tokens, hold `POISON`. So attending
past the end of a request changes the output.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from vllm_async_spec.attention.reference import ReferenceArguments, paged_attention
from vllm_async_spec.compat.builder_inputs import HEAD_SIZE, HEADS, KV_HEADS, LAYER, configured
from vllm_async_spec.compat.cases import BLOCK_SIZE, NUM_BLOCKS, Case
from vllm_async_spec.compat.device import Device

POISON = 1000.0
"""Finite, because kernels multiply masked values by 0; far from any key or value of a batch."""

NOTHING_COMPILED = "nothing is compiled of a release that is only unpacked"
"""Why no layer of an unpacked release attends."""

NOT_TINY = "attention runs with the tiny model only"
"""Why no layer of another model attends."""

NO_KERNEL_RUNS = "no kernel runs on a simulated device"
"""Why no layer of vLLM's own attends on a simulated device."""

_SCALE = HEAD_SIZE**-0.5
"""Factor on the logits."""

Surround = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context in which an implementation is made."""


class NoForwardError(RuntimeError):
    """Attention can't run here; the message says why in one sentence, without the backend's name."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A case as device tensors for a layer; T is the number of tokens of all sequences together.

    Attributes:
        case: The case.
        block_size: Tokens in a block of the KV cache.
        query_start_loc: (rows + 1,) int32.
        seq_lens: (rows,) int32, exact.
        block_table: (rows, blocks) int32.
        slot_mapping: (query tokens, padding included,) int64; -1 for padding.
        slots: (T,) int64: where each token's keys lie.
        content: (T,) int64: number of the token whose keys each token has: its own, or its position in a shared prefix.
        context: (tokens computed before,) int64: numbers of these tokens among all T.
        new: (query tokens without padding,) int64: numbers of these tokens among all T.
        positions: (query tokens without padding,) int64: position of each in its sequence.
    """

    case: Case
    block_size: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    slots: torch.Tensor
    content: torch.Tensor
    context: torch.Tensor
    new: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, case: Case, device: Device, *, block_size: int = BLOCK_SIZE, common_prefix: int = 0) -> Batch:
        """The batch of a case, on `device`; the first `common_prefix` tokens of all requests are the same."""
        fields = case.fields(block_size=block_size)
        blocks = fields["block_table_tensor"].long()
        at = [torch.arange(length) for length in case.seq_lens]
        slots = [row[p // block_size] * block_size + p % block_size for row, p in zip(blocks, at, strict=True)]
        position = torch.cat(at)
        number = torch.arange(len(position))
        content = torch.where(position < common_prefix, position, number)
        new = torch.cat([p >= len(p) - query for p, query in zip(at, case.query_lens, strict=True)])
        return cls(
            case,
            block_size,
            query_start_loc=device.place(fields["query_start_loc"]),
            seq_lens=device.place(fields["seq_lens"]),
            block_table=device.place(fields["block_table_tensor"]),
            slot_mapping=device.place(fields["slot_mapping"]),
            slots=device.place(torch.cat(slots)),
            content=device.place(content),
            context=device.place(number[~new]),
            new=device.place(number[new]),
            positions=device.place(position[new]),
        )

    @property
    def tokens(self) -> int:
        """Query tokens, padding included."""
        return self.slot_mapping.shape[0]

    def queries(self, of_all: torch.Tensor) -> torch.Tensor:
        """Select the query tokens: (T, ...) to (query tokens, padding included, ...), with zeros for padding."""
        padded = of_all.new_zeros(self.tokens, *of_all.shape[1:])
        padded[: len(self.new)] = of_all[self.new]
        return padded


class Layer(Protocol):
    """One attention layer."""

    def fill(self, batch: Batch) -> None:
        """Take a batch, and write the keys of its context by the layer's own write path."""

    def attend(self, metadata: Any) -> torch.Tensor:
        """Run the layer's part of a step with built metadata: write the keys of the query tokens, then attend.

        Returns:
            (compared tokens, query heads, head size): the output, without padding.
        """

    def expected(self) -> torch.Tensor:
        """The right output of `attend`, float32, computed from the batch alone, without metadata."""


def random(device: Device, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed numbers of this shape on the device, the same for the same seed and shape."""
    return device.place(_random(seed, shape).to(dtype, copy=True))


@functools.lru_cache(maxsize=8)
def _random(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(
    batch: Batch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    chunk: int | None = None,
) -> torch.Tensor:
    """Attention over a batch in float32, by `attention.reference.paged_attention`.

    Args:
        batch: The batch.
        query: (query tokens, padding included, query heads, head size).
        keys: (T, KV heads, head size).
        values: (T, KV heads, head size).
        scale: Factor on the logits.
        causal: Whether a token sees no token after it.
        chunk: Tokens per chunk of chunked local attention, a multiple of the block size; None for full attention.

    Returns:
        (query tokens without padding, query heads, head size) float32.
    """
    blocks = int(batch.block_table.max()) + 1

    def paged(of_tokens: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(blocks * batch.block_size, *of_tokens.shape[1:], device=of_tokens.device)
        cache[batch.slots] = of_tokens.float()
        return cache.view(blocks, batch.block_size, *of_tokens.shape[1:])

    lengths, table, starts = batch.seq_lens, batch.block_table, batch.query_start_loc
    longest = max(batch.case.query_lens)
    real = len(batch.new)
    if chunk is not None:
        # Treat each query token as a request that begins where the token's chunk begins.
        first = batch.positions // chunk * chunk
        row = torch.searchsorted(starts[1:].contiguous(), torch.arange(real, device=starts.device), right=True)
        column = first[:, None] // batch.block_size + torch.arange(chunk // batch.block_size, device=starts.device)
        table = table[row[:, None], column.clamp(max=table.shape[1] - 1)]
        lengths = (batch.positions - first + 1).int()
        starts, longest = torch.arange(real + 1, dtype=torch.int32, device=starts.device), 1
    arguments = ReferenceArguments(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        max_query_len=longest,
        max_seq_len=chunk or max(batch.case.seq_lens),
        causal=causal,
    )
    return paged_attention(query[:real].float(), paged(keys), paged(values), arguments, scale=scale)


class ImplLayer:
    """One layer of a backend that has `get_impl_cls`; it attends as vLLM's `Attention` does.

    vLLM's own layer is not used, because it needs a model, ranks and weights. The implementation is given what every
    release's layer gives it:

    - an unpadded KV cache of one layer, with the shape and stride order of the backend, or of the release's KV-cache
      spec;
    - scales of 1, as tensors on the device and as floats;
    - keys by `do_kv_cache_update`, or by `forward` where that writes them.

    Args:
        backend: The backend class.
        builder: The builder whose metadata the layer will be given.
        device: Where the layer attends.
        block_size: Tokens in a block of the KV cache.
        encoder: Whether attention is bidirectional, over the keys of the batch's query tokens only.
        chunk: Tokens per chunk of chunked local attention; None for full attention.
        last_only: Whether only the last token of each request attends, as in KV-sharing fast prefill.
        surround: Makes the context in which the implementation is made.

    Raises:
        NoForwardError: Neither the backend nor vLLM says the shape of the KV cache.
    """

    def __init__(
        self,
        backend: Any,
        builder: Any,
        device: Device,
        block_size: int,
        *,
        encoder: bool = False,
        chunk: int | None = None,
        last_only: bool = False,
        surround: Surround = contextlib.nullcontext,
    ) -> None:
        self._encoder, self._chunk, self._last_only, self._device = encoder, chunk, last_only, device
        with configured(builder), surround(), device.watching():
            self._cache = kv_cache(backend, builder, device, block_size, KV_HEADS, HEAD_SIZE)
            self._layer = layer_attributes(builder, device)
            self.impl = backend.get_impl_cls()(
                HEADS, HEAD_SIZE, _SCALE, KV_HEADS, None, None, "auto", None, _attention_type(encoder), None
            )

    def fill(self, batch: Batch) -> None:
        """See `Layer`."""
        self._batch = batch
        count = len(batch.content)
        keys, values = (random(self._device, seed, count, KV_HEADS, HEAD_SIZE) for seed in (1, 2))
        self._keys, self._values = keys[batch.content], values[batch.content]
        self._query = random(self._device, 3, batch.tokens, HEADS, HEAD_SIZE)
        self._new_keys, self._new_values = batch.queries(self._keys), batch.queries(self._values)
        with self._device.watching():
            self._output = torch.zeros(batch.tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=self._device.device)
            self._cache.fill_(POISON)
        if self._encoder or len(batch.context) == 0:
            return
        if not hasattr(self.impl, "do_kv_cache_update"):
            raise NoForwardError(
                "this release's forward writes only the step's keys, so the suite can't fill the context"
            )
        keys, values = self._keys[batch.context], self._values[batch.context]
        self.impl.do_kv_cache_update(self._layer, keys, values, self._cache, batch.slots[batch.context])

    def attend(self, metadata: Any) -> torch.Tensor:
        """See `Layer`."""
        query, keys, values, output = self._query, self._new_keys, self._new_values, self._output
        if not self._encoder and hasattr(self.impl, "do_kv_cache_update"):
            self.impl.do_kv_cache_update(self._layer, keys, values, self._cache, self._batch.slot_mapping)
        if self._last_only:
            last = self._last()
            query, keys, values, output = query[last], keys[last], values[last], output[: len(last)]
        self.impl.forward(self._layer, query, keys, values, self._cache, metadata, output=output)
        return output if self._last_only else output[: len(self._batch.new)]

    def expected(self) -> torch.Tensor:
        """See `Layer`."""
        out = reference(
            self._batch,
            self._query,
            self._keys,
            self._values,
            scale=_SCALE,
            causal=not self._encoder,
            chunk=self._chunk,
        )
        return out[self._last()] if self._last_only else out

    def _last(self) -> torch.Tensor:
        """The last query token of each request that is not padding."""
        ends: torch.Tensor = self._batch.query_start_loc[1 : self._batch.case.live + 1].long() - 1
        return ends


def kv_cache(
    backend: Any, builder: Any, device: Device, block_size: int, kv_heads: int, head_size: int
) -> torch.Tensor:
    """An uninitialised KV cache as the loaded release makes it for one layer, bfloat16.

    It holds as many tokens as `NUM_BLOCKS` blocks of `BLOCK_SIZE`.

    The builder's spec of the KV cache may say its shape. The caller must be watching the device.

    Raises:
        NoForwardError: Neither the backend nor vLLM says its shape.
    """
    blocks = NUM_BLOCKS * BLOCK_SIZE // block_size
    if hasattr(backend, "get_kv_cache_shape"):
        shape = backend.get_kv_cache_shape(blocks, block_size, kv_heads, head_size)
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        return _permuted(shape, order, torch.bfloat16, device)
    interface: Any = sys.modules.get("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "compute_layer_kv_cache_shape_bytes"):
        raise NoForwardError("neither the backend nor vLLM gives the shape of the KV cache")
    spec = backend.customize_spec(builder.kv_cache_spec)
    layouts = backend.supported_kv_cache_layouts()
    layout = (layouts or (interface.KVCacheLayout.LBNHC,))[0]
    shape = interface.compute_layer_kv_cache_shape_bytes(spec, blocks)
    return _permuted(shape, layout.layer_view_order, torch.int8, device).view(torch.bfloat16)


def _permuted(shape: Any, order: Any, dtype: torch.dtype, device: Device) -> torch.Tensor:
    memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device.device)
    return memory.permute(*(order.index(axis) for axis in range(len(order))))


def layer_attributes(builder: Any, device: Device) -> Any:
    """The layer attributes that implementations read: scales of 1, the name, and the builder's instruction set."""
    one = device.place(torch.ones((), dtype=torch.float32))
    scales = {f"_{of}_scale": one for of in ("q", "k", "v", "prob")}
    floats = {f"_{of}_scale_float": 1.0 for of in ("q", "k", "v")}
    return SimpleNamespace(
        **scales,
        **floats,
        _o_scale_float=None,
        layer_name=LAYER,
        isa=getattr(builder, "isa", None),
        kv_cache_dtype="auto",
    )


def _attention_type(encoder: bool) -> Any:
    for module in ("vllm.v1.attention.backend", "vllm.attention.backends.abstract"):
        if "vllm" in sys.modules and importlib.util.find_spec(module) is not None:
            kinds = importlib.import_module(module).AttentionType
            return kinds.ENCODER_ONLY if encoder else kinds.DECODER
    return "encoder_only" if encoder else "decoder"
