"""CUPTI's records of a recording: what ran on the device and when, and the runtime calls that the host made."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runtime:
    """One call of the CUDA runtime or driver."""

    thread: int
    """The calling thread as CUPTI names it; `cupti_thread` of Python's identifier."""
    name: str
    start: int
    end: int
    copy: str = ""
    """Direction and host memory of a copy, such as `DtoH Pageable`; empty for other calls."""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """What the device did, by start: parallel arrays, in nanoseconds since the epoch."""

    start: Times
    end: Times
    launched: Times
    """When the host's call put the work into its stream; if unknown, the start of the work."""
    stream: Times
    is_copy: npt.NDArray[np.bool_]
    names: tuple[str, ...]
    calls: tuple[Runtime, ...]
    """Every call of the CUDA runtime or driver, by start, without `copy` and `bytes`."""
    blocking: tuple[Runtime, ...]
    """The calls that can block, by start, with `copy` and `bytes`."""


_WAITS = re.compile(r"^(cuda|cu)(Stream|Event|Device|Ctx)Synchronize|^cudaFree(Host)?$|^cudaMemcpy(2D)?$")
_COPY = re.compile(r"^(cuda|cu)Memcpy.*Async")
_DIRECTION = re.compile(r"Memcpy (\w+) \((\w+) -> (\w+)\)")


def cupti_thread(ident: int) -> int:
    """CUPTI's number for Python's thread `ident`: the absolute value of its lower 32 bits, taken as signed."""
    low = ident & 0xFFFFFFFF
    return abs(low - (1 << 32) if low >= 1 << 31 else low)


def read_trace(path: Path) -> DeviceTrace:
    """Read a trace that PyTorch's profiler exported."""
    data = json.loads(path.read_text(encoding="utf-8"))
    base = int(data.get("baseTimeNanoseconds", 0))
    device, calls = [], []
    for event in data["traceEvents"]:
        category = event.get("cat")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            calls.append(event)
    device.sort(key=lambda event: event["ts"])
    launched = {event["args"].get("correlation"): _ns(base, event["ts"]) for event in calls}
    copies = {event["args"].get("correlation"): event for event in device if event["cat"] == "gpu_memcpy"}
    start = np.array([_ns(base, event["ts"]) for event in device], dtype=np.int64)
    end = start + np.array([round(event["dur"] * 1000) for event in device], dtype=np.int64)
    return DeviceTrace(
        start=start,
        end=end,
        launched=np.array(
            [launched.get(event["args"].get("correlation"), s) for event, s in zip(device, start, strict=True)],
            dtype=np.int64,
        ),
        stream=np.array([event["args"].get("stream", 0) for event in device], dtype=np.int64),
        is_copy=np.array([event["cat"] == "gpu_memcpy" for event in device], dtype=bool),
        names=tuple(event["name"] for event in device),
        calls=tuple(sorted((_runtime(base, call) for call in calls), key=lambda call: call.start)),
        blocking=tuple(sorted(_blocking(base, calls, copies), key=lambda call: call.start)),
    )


def _ns(base: int, microseconds: float) -> int:
    return base + round(microseconds * 1000)


def _blocking(base: int, calls: list[dict], copies: dict) -> list[Runtime]:  # type: ignore[type-arg]
    found = []
    for call in calls:
        name, copy = call["name"], copies.get(call["args"].get("correlation"))
        if not _WAITS.match(name) and not (_COPY.match(name) and copy is not None):
            continue
        kind, size = "", 0
        if copy is not None:
            match = _DIRECTION.search(copy["name"])
            direction, *ends = match.groups() if match else ("", "", "")
            if direction not in ("DtoH", "HtoD"):
                continue
            kind = f"{direction} {'Pageable' if 'Pageable' in ends else 'Pinned'}"
            size = int(copy["args"].get("bytes", 0))
        found.append(_runtime(base, call, kind, size))
    return found


def _runtime(base: int, call: dict, kind: str = "", size: int = 0) -> Runtime:  # type: ignore[type-arg]
    start = _ns(base, call["ts"])
    return Runtime(call["tid"], call["name"], start, start + round(call["dur"] * 1000), kind, size)
