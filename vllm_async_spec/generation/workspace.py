"""What stays with a model from one generation of ours to the next: buffers, cache, streams and graphs."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_async_spec.generation.decode_buffers import DecodeBuffers
from vllm_async_spec.generation.full_static_cache import cache_bytes
from vllm_async_spec.generation.memory import MemoryReport, reserved
from vllm_async_spec.generation.slots import CudaSlots, HostSlots, Slots
from vllm_async_spec.generation.step_graphs import StepGraphs


@dataclass(slots=True)
class Workspace:
    """Device memory of one model's generations; serves one at a time."""

    reuse_key: Any
    """What a generation has to have in common with the one that this was made for."""
    longest: int
    """Tokens of a sequence at most."""
    buffers: DecodeBuffers
    cache: Any
    """A `StaticCache`, or None where each generation brings its own."""
    slots: Slots
    graphs: StepGraphs | None = None
    read_by_graphs: tuple[torch.Tensor, ...] = ()
    """What the graphs read beside buffers, cache and weights; it must live as long as they do."""
    channels: dict[Any, Any] = field(default_factory=dict)
    """Flag channels by what they were opened with: a stream each, so that a new one is not taken at each call."""

    def report(self) -> MemoryReport:
        """What it holds."""
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
    """Two streams of a CUDA device; of another, none."""
    return CudaSlots(device) if device.type == "cuda" else HostSlots()


_kept: weakref.WeakKeyDictionary[Any, Workspace] = weakref.WeakKeyDictionary()
_in_use: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def in_use(model: Any) -> Iterator[None]:
    """Keep the workspace of the model from a second generation, of another thread or nested in this one.

    Raises:
        RuntimeError: there is one already.
    """
    lock = _in_use.setdefault(model, threading.Lock())
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"this {type(model).__name__} generates already, in another thread or in a call around this one, and the "
            "two would share their buffers; wait for the other, or leave out interleaved"
        )
    try:
        yield
    finally:
        lock.release()


def kept(model: Any, reuse_key: Any, longest: int) -> Workspace | None:
    """The workspace of the model's last generation, if one like it and as long fits into it."""
    found = _kept.get(model)
    fits = found is not None and found.reuse_key == reuse_key and found.longest >= longest
    return found if fits else None


def keep(model: Any, workspace: Workspace) -> None:
    """Keep it for the next generation."""
    _kept[model] = workspace


def release(model: Any) -> None:
    """Free what `generate(interleaved=...)` has kept for `model`: one workspace, that of the last generation.

    The next generation makes it anew. Nothing happens where nothing is kept.
    """
    workspace = _kept.pop(model, None)
    if workspace is not None and workspace.slots.streams:
        # Not while another thread captures, which waiting for the device would break.
        with workspace.slots.turn():
            # Its streams may still run a step that did not count, and its memory goes to whoever asks next.
            torch.cuda.synchronize(workspace.buffers.length.device)


def memory_report(model: Any) -> MemoryReport:
    """What is kept for `model` between its interleaved generations.

    Raises:
        LookupError: nothing is.
    """
    workspace = _kept.get(model)
    if workspace is None:
        raise LookupError(f"nothing is kept for this {type(model).__name__}; generate with interleaved=True first")
    return workspace.report()
