"""What a model keeps between interleaved generations: device memory, its size, and the allocator's switch."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_async_spec.generation.decode_buffers import DecodeBuffers, cache_bytes
from vllm_async_spec.generation.slots import CudaSlots, HostSlots, Slots
from vllm_async_spec.generation.step_graphs import StepGraphs

_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that stay allocated for a model between its interleaved generations."""

    cache: int
    """Keys and values of the static cache."""
    buffers: int
    """Tokens, flags, masks and positions."""
    graph_pool: int
    """Reserved for the graphs of both slots, which share it."""
    streams: tuple[int, ...]
    """Reserved for the stream of each slot; empty if there are no streams."""
    expandable: bool
    """Whether any of this memory is in expandable segments."""

    @property
    def total(self) -> int:
        """Sum of the four parts."""
        return self.cache + self.buffers + self.graph_pool + sum(self.streams)

    def over(self, limit: int) -> str:
        """The error message for a total above `limit` bytes."""
        return (
            f"interleaved generation holds {self.total} bytes (cache {self.cache}, buffers {self.buffers}, "
            f"graphs {self.graph_pool}, streams {sum(self.streams)}), and memory_limit is {limit}; raise the limit, or "
            "generate fewer or shorter sequences"
        )


def reserved(
    segments: list[dict[str, Any]], *, pool: Any | None, streams: tuple[int, ...]
) -> tuple[int, tuple[int, ...], bool]:
    """Measure what the caching allocator reserves for a graph pool, and for each stream, by address, outside the pool.

    `segments` are those of `torch.cuda.memory_snapshot()`.

    Returns:
        Bytes of the pool, bytes of each stream, and whether a counted segment is expandable.
    """
    in_pool, expandable = 0, False
    of_stream = dict.fromkeys(streams, 0)
    for segment in segments:
        if pool is not None and tuple(segment["segment_pool_id"]) == tuple(pool):
            in_pool += segment["total_size"]
        elif segment["stream"] in of_stream and tuple(segment["segment_pool_id"]) == (0, 0):
            of_stream[segment["stream"]] += segment["total_size"]
        else:
            continue
        expandable = expandable or bool(segment.get("is_expandable", False))
    return in_pool, tuple(of_stream[stream] for stream in streams), expandable


@dataclass(slots=True)
class Workspace:
    """Device memory for one model's generations; serves one generation at a time."""

    reuse_key: Any
    """What a generation must have in common with the first one to reuse this workspace."""
    longest: int
    """Maximum tokens of a sequence."""
    buffers: DecodeBuffers
    cache: Any
    """A `StaticCache`, or None if each generation brings its own cache."""
    slots: Slots
    graphs: StepGraphs | None = None
    read_by_graphs: tuple[torch.Tensor, ...] = ()
    """Tensors that the graphs read beside buffers, cache and weights; they must live as long as the graphs."""
    channels: dict[Any, Any] = field(default_factory=dict)
    """Flag channels by width and copies in flight. Each has a stream, so reuse keeps calls from taking new streams."""

    def report(self) -> MemoryReport:
        """Measure the memory that this workspace holds."""
        in_pool, of_streams, expandable = reserved(
            torch.cuda.memory_snapshot() if self.slots.streams else [],
            pool=self.graphs.pool if self.graphs else None,
            streams=tuple(stream.cuda_stream for stream in self.slots.streams),
        )
        return MemoryReport(
            cache=cache_bytes(self.cache) if self.cache is not None else 0,
            buffers=self.buffers.nbytes,
            graph_pool=in_pool,
            streams=of_streams,
            expandable=expandable,
        )


def slots_of(device: torch.device) -> Slots:
    """Two streams on a CUDA device; no streams on another device."""
    return CudaSlots(device) if device.type == "cuda" else HostSlots()


_kept: weakref.WeakKeyDictionary[Any, Workspace] = weakref.WeakKeyDictionary()
_in_use: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def in_use(model: Any) -> Iterator[None]:
    """Reserve the model's workspace for one generation, in the block.

    Raises:
        RuntimeError: another generation has it, in another thread or around this call.
    """
    lock = _in_use.setdefault(model, threading.Lock())
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"this {type(model).__name__} already generates, in another thread or in an enclosing call, and the two "
            "generations would share buffers; wait until the other ends, or leave out interleaved"
        )
    try:
        yield
    finally:
        lock.release()


def kept(model: Any, reuse_key: Any, longest: int) -> Workspace | None:
    """The workspace of the model's last generation, if it fits this key and length."""
    found = _kept.get(model)
    fits = found is not None and found.reuse_key == reuse_key and found.longest >= longest
    return found if fits else None


def keep(model: Any, workspace: Workspace) -> None:
    """Keep the workspace for the model's next generation."""
    _kept[model] = workspace


def release(model: Any) -> None:
    """Free the workspace that `generate(interleaved=...)` keeps for `model`, that of the last generation.

    The next generation allocates a new one. If nothing is kept, nothing happens.
    """
    workspace = _kept.pop(_inner(model), None)
    if workspace is not None and workspace.slots.streams:
        # Take a turn, because waiting for the device would break another thread's capture.
        with workspace.slots.turn():
            # An extra step may still run on its streams, and its memory goes to the next allocation.
            torch.cuda.synchronize(workspace.buffers.length.device)


def _inner(model: Any) -> Any:
    """The model that generates, within the wrapper of torch.compile or of PEFT."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def memory_report(model: Any) -> MemoryReport:
    """The memory that `model` keeps between its interleaved generations.

    Raises:
        LookupError: the model keeps nothing.
    """
    workspace = _kept.get(_inner(model))
    if workspace is None:
        raise LookupError(f"no workspace is kept for this {type(model).__name__}; generate with interleaved=True first")
    return workspace.report()


def use_expandable_segments() -> None:
    """Let the allocator grow its segments, so that memory of one stream or pool is not fragmented.

    Sets `expandable_segments:True` of PYTORCH_ALLOC_CONF for the whole process.

    Raises:
        RuntimeError: there is no CUDA device, or CUDA is already initialised.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("expandable segments need a CUDA device, and PyTorch finds none; leave out this call")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is initialised already, which is too late for expandable segments; call use_expandable_segments() "
            f"before anything touches the device, or start with PYTORCH_ALLOC_CONF={_EXPANDABLE}"
        )
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = f"{chosen},{_EXPANDABLE}" if chosen else _EXPANDABLE
    # PyTorch reads the variable once, perhaps already: set this process's allocator too.
    os.environ["PYTORCH_ALLOC_CONF"] = settings
    of_any_device = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (of_any_device or torch.cuda.memory._set_allocator_settings)(settings)
