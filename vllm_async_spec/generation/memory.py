"""What interleaved generation holds on the device, and the allocator's switch for segments that grow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that stay with a model between its interleaved generations."""

    cache: int
    """Keys and values of the static cache."""
    buffers: int
    """Tokens, flags, masks and positions."""
    graph_pool: int
    """Reserved for the graphs of both slots, which share it."""
    streams: tuple[int, ...]
    """Reserved for each stream: those of the two slots, or none where there are no streams."""
    expandable: bool
    """Whether any of what is reserved is in expandable segments."""

    @property
    def total(self) -> int:
        """Their sum."""
        return self.cache + self.buffers + self.graph_pool + sum(self.streams)

    def over(self, limit: int) -> str:
        """What to say where the total is over `limit` bytes."""
        return (
            f"interleaved generation holds {self.total} bytes (cache {self.cache}, buffers {self.buffers}, "
            f"graphs {self.graph_pool}, streams {sum(self.streams)}), and memory_limit is {limit}; raise it, or "
            "generate fewer or shorter sequences"
        )


def reserved(
    segments: list[dict[str, Any]], *, pool: Any | None, streams: tuple[int, ...]
) -> tuple[int, tuple[int, ...], bool]:
    """What of the caching allocator's segments belongs to a pool of graphs, and to each of some streams outside it.

    Args:
        segments: of `torch.cuda.memory_snapshot()`.
        pool: the handle of the graphs' pool, or None.
        streams: addresses of CUDA streams.

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


def use_expandable_segments() -> None:
    """Let the allocator grow its segments, so that memory of one stream or pool is not cut in pieces.

    It is the switch `expandable_segments:True` of PYTORCH_ALLOC_CONF, for the whole process.

    Raises:
        RuntimeError: there is no CUDA device, or CUDA is initialised already.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("expandable segments are of CUDA memory, and PyTorch finds no CUDA device; leave them out")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is initialised already, which is too late for expandable segments; call use_expandable_segments() "
            f"before anything touches the device, or start with PYTORCH_ALLOC_CONF={_EXPANDABLE}"
        )
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = f"{chosen},{_EXPANDABLE}" if chosen else _EXPANDABLE
    # Read once, when the allocator is first used, so for this process the environment alone may be too late.
    os.environ["PYTORCH_ALLOC_CONF"] = settings
    of_any_device = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (of_any_device or torch.cuda.memory._set_allocator_settings)(settings)
