"""Cuts batches of chunked local attention into virtual batches on the device, to avoid a wait for exact lengths.

vLLM cuts a batch on the host, from exact lengths. If the attention backend reads lengths and offsets only on the
device, a subclass of its builder marks the batch. For a marked batch, the patched function allocates the most rows that
there can be, and the device fills them. Host views of such a batch are lazy: each first read waits, counted.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vllm_async_spec.host_copy import HostCopy
from vllm_async_spec.kernels import compile_virtual_batches, gather_pages, split_by_chunks, virtual_batches
from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation, PatchError
from vllm_async_spec.vllm_plugin.patches.metadata import without_host_lengths
from vllm_async_spec.vllm_plugin.upstream import BatchMetadata, BuilderBase

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import AttentionBackend

    _UpstreamT = TypeVar("_UpstreamT")

_CUT = "make_local_attention_virtual_batches"
_CREATE = "create_chunked_local_attention_backend"

_DEVICE_BACKENDS = {"FLASH_ATTN", "TRITON_ATTN"}
"""Names of backends whose builders read only scalars of a batch on the host."""


def _apply(transaction: Transaction, module: ModuleType) -> None:
    original = getattr(module, _CUT)
    lazy = _before(_LazyHostViews, without_host_lengths(module.CommonAttentionMetadata))
    # Until 0.13 this returns only the metadata; later also a function that gathers another block table's pages.
    returns_both = typing.get_origin(original.__annotations__["return"]) is tuple

    @functools.wraps(original)
    def make_local_attention_virtual_batches(
        attn_chunk_size: int, common_attn_metadata: BatchMetadata, block_size: int = 0
    ) -> object:
        if not getattr(common_attn_metadata, "cut_on_device", False):
            if getattr(common_attn_metadata, "_seq_lens_cpu", None) is None:
                record_fallback("chunked local attention")
            return original(attn_chunk_size, common_attn_metadata, block_size)
        made = _cut_on_device(lazy, attn_chunk_size, common_attn_metadata, block_size)
        return made if returns_both else made[0]

    transaction.set_function(module, _CUT, make_local_attention_virtual_batches)


def _cut_on_device(
    metadata_class: Callable[..., BatchMetadata], chunk: int, metadata: BatchMetadata, block_size: int
) -> tuple[BatchMetadata, Callable[[torch.Tensor], torch.Tensor]]:
    """The virtual batches of a batch, and a function that gathers their pages from a block table."""
    if chunk % block_size:
        raise ValueError(
            f"the attention chunk is {chunk} tokens and a KV cache block {block_size}; a chunk must be whole blocks, "
            "so choose a --block-size that divides it"
        )
    lengths, starts = metadata.seq_lens, metadata.query_start_loc
    count = int(virtual_batches(metadata.query_start_loc_cpu.diff(), chunk).sum())
    virtual_starts = starts.new_empty(count + 1)
    virtual_lens, requests, chunks = lengths.new_empty(3, count)
    split_by_chunks(starts, lengths, chunk, virtual_starts, virtual_lens, requests, chunks)

    def make_block_table(block_table: torch.Tensor) -> torch.Tensor:
        return gather_pages(block_table, requests, chunks, chunk // block_size)

    virtual = metadata_class(
        query_start_loc=virtual_starts,
        query_start_loc_cpu=None,
        seq_lens=virtual_lens,
        num_reqs=count,
        num_actual_tokens=metadata.num_actual_tokens,
        max_query_len=min(int(metadata.max_query_len), chunk),
        max_seq_len=min(int(metadata.max_seq_len), chunk),
        block_table_tensor=make_block_table(metadata.block_table_tensor),
        slot_mapping=metadata.slot_mapping,
        causal=True,
    )
    return virtual, make_block_table


class _LazyHostViews:
    """Copies exact query offsets and lengths to the host on first read; the copy is counted."""

    @property
    def query_start_loc_cpu(self) -> torch.Tensor:
        return self._host_view("query_start_loc")

    @query_start_loc_cpu.setter
    def query_start_loc_cpu(self, value: torch.Tensor | None) -> None:
        self.__dict__["_host_query_start_loc"] = value

    @property
    def seq_lens_cpu_upper_bound(self) -> torch.Tensor:
        return self._host_view("seq_lens")

    @seq_lens_cpu_upper_bound.setter
    def seq_lens_cpu_upper_bound(self, value: torch.Tensor | None) -> None:
        self.__dict__["_host_seq_lens"] = value

    def _host_view(self, name: str) -> torch.Tensor:
        known: torch.Tensor | None = self.__dict__.get(f"_host_{name}")
        if known is None:
            known = self.__dict__[f"_host_{name}"] = HostCopy(getattr(self, name), name).read()
        return known


def _apply_marks(transaction: Transaction, module: ModuleType) -> None:
    if not hasattr(getattr(module, _CUT), "__wrapped__"):
        raise PatchError("virtual batches are made on the host, because the patch virtual-batches-cut was refused")
    original = getattr(module, _CREATE)

    @functools.cache
    @functools.wraps(original)
    def create_chunked_local_attention_backend(
        underlying_attn_backend: type[AttentionBackend], attention_chunk_size: int, *sizes: int
    ) -> object:
        backend = original(underlying_attn_backend, attention_chunk_size, *sizes)
        cuts = underlying_attn_backend.get_name() in _DEVICE_BACKENDS
        builder = _before(_CutOnDevice if cuts else _BuiltEachStep, backend.get_builder_cls())
        builder.chunk = attention_chunk_size
        return type(backend.__name__, (backend,), {"get_builder_cls": staticmethod(lambda: builder)})

    transaction.set_function(module, _CREATE, create_chunked_local_attention_backend)


class _BuiltEachStep(BuilderBase):
    """Goes before vLLM's builder, and has each draft step built.

    From 0.28 on builders say whether an update serves instead, and those of virtual batches inherit the answer. An
    update cuts no batch, so later draft steps would attend to the lengths of the first.
    """

    chunk: int
    """Tokens in a chunk, of the subclass that is made for it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.supports_draft_decode_metadata_update = False


class _CutOnDevice(_BuiltEachStep):
    """Marks its batches to be cut on the device, too."""

    cuts_on_device = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's dummy runs build no such metadata, so the first request would wait for the kernels.
        compile_virtual_batches(self.chunk, self.chunk // self.kv_cache_spec.block_size, self.device)

    def build(self, common_prefix_len: int, common_attn_metadata: BatchMetadata, fast_build: bool = False) -> object:
        marked: Any = copy.copy(common_attn_metadata)
        marked.cut_on_device = True
        return super().build(common_prefix_len, marked, fast_build)


def _before(first: type[object], upstream: type[_UpstreamT]) -> type[_UpstreamT]:
    """A subclass of `first` and vLLM's class, in this order, under the name of vLLM's class."""
    return type(upstream.__name__, (first, upstream), {"__module__": __name__, "__qualname__": upstream.__qualname__})


IMPLEMENTATIONS = {
    "virtual-batches-cut": Implementation(_apply),
    "virtual-batches-taken": Implementation(_apply_marks),
}
