"""How long single calls of vLLM's step hold the host while the device is busy.

    python -m benchmarks held [--json FILE] [--times N]

Before each call the device gets a tenth of a second of work. A call that waits for the device takes as long. A call
that only launches takes microseconds.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.machine import MachineError
from benchmarks.present import Grid
from benchmarks.statistics import summary

DRAFTS = 4 * 32
"""Rows of logits in a step of 32 requests with three drafts each."""
VOCABULARY = 32_000
_CYCLES = 200_000_000


def calls() -> dict[str, Callable[[], Any]]:
    """The calls to measure, by their names in the table; each launches what vLLM's V1 runner launches."""
    device, tokens = torch.device("cuda"), torch.int64
    indices = np.arange(DRAFTS, dtype=np.int32)
    positions = torch.zeros(3, 8193, dtype=tokens, device=device)
    pinned = torch.zeros(3, 8193, dtype=tokens).pin_memory()
    logits = torch.randn(DRAFTS, VOCABULARY, device=device)
    largest = torch.full((DRAFTS,), 20, dtype=torch.int32, device=device)
    return {
        "nothing": lambda: None,
        "indices of drafts, from pageable memory": lambda: torch.from_numpy(indices).to(device, non_blocking=True),
        "M-RoPE positions of 128 tokens, strided": lambda: positions[:, :DRAFTS].copy_(
            pinned[:, :DRAFTS], non_blocking=True
        ),
        "M-RoPE positions of 8,192 tokens, strided": lambda: positions[:, :-1].copy_(pinned[:, :-1], non_blocking=True),
        "top-k, the largest k asked for": lambda: logits.topk(int(largest.max()), dim=1),
        "top-k, the largest k known": lambda: logits.topk(20, dim=1),
    }


def measure(times: int) -> dict[str, Any]:
    """The result file: milliseconds that the host is held by each call.

    Raises:
        MachineError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise MachineError(
            "PyTorch finds no CUDA device, and a CPU run measures nothing; run this on a machine with a GPU"
        )
    busy = _milliseconds(lambda: torch.cuda.synchronize())
    found = {name: [_milliseconds(call) for _ in range(times + 1)][1:] for name, call in calls().items()}
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "busy_ms": busy,
        "calls": {name: summary(values) for name, values in found.items()},
    }


def table(found: dict[str, Any]) -> Table:
    rows = [(name, in_words(row)) for name, row in found["calls"].items()]
    title = f"{found['device']}, busy for {found['busy_ms']:.0f} ms before each"
    return Grid(("call", "host held, ms"), rows).table(title)


def in_words(row: dict[str, Any]) -> str:
    """Such as `0.06 (0.05-0.25, n = 20)`."""
    return f"{row['median']:.2f} ({row['least']:.2f}-{row['most']:.2f}, n = {row['n']})"


def _milliseconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    start = time.perf_counter()
    call()
    held = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return held
