"""Recordings made by hand: CUPTI's trace in PyTorch's format, and what a recorder saves beside it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_async_spec.audit.device_trace import cupti_thread
from vllm_async_spec.audit.recorded import Recorded, load

BASE = 1_790_857_026_000_000_000
MAIN = 140_607_295_127_872
OTHER = 140_593_167_476_416
HERE = "/lib/python3/site-packages/vllm/v1/backend.py"


def stack(line: int, function: str = "build") -> list[list[Any]]:
    return [["/x/site-packages/torch/_tensor.py", 9, "item"], [HERE, line, function], [HERE, 1, "execute_model"]]


@dataclass
class Recording:
    """Times are microseconds from the start of the first counted step."""

    events: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    correlation: int = 0

    def runtime(self, name: str, start: float, us: float, thread: int = MAIN) -> int:
        self.correlation += 1
        self.events.append(
            {
                "cat": "cuda_runtime",
                "name": name,
                "ts": 1e6 + start,
                "dur": us,
                "tid": cupti_thread(thread),
                "args": {"correlation": self.correlation},
            }
        )
        return self.correlation

    def kernel(self, start: float, us: float, launched: float | None = None, stream: int = 7, name: str = "k") -> None:
        correlation = self.runtime("cudaLaunchKernel", start - 5 if launched is None else launched, 1)
        args = {"correlation": correlation, "stream": stream}
        self.events.append({"cat": "kernel", "name": name, "ts": 1e6 + start, "dur": us, "args": args})

    def copy(self, call: float, us: float, kind: str, size: int, at: float, thread: int = MAIN) -> None:
        args = {"correlation": self.runtime("cudaMemcpyAsync", call, us, thread), "stream": 7, "bytes": size}
        self.events.append({"cat": "gpu_memcpy", "name": f"Memcpy {kind}", "ts": 1e6 + at, "dur": 1, "args": args})

    def call(self, what: str, start: float, end: float, line: int, thread: int = MAIN) -> None:
        self.calls.append({"thread": thread, "what": what, "start": ns(start), "end": ns(end), "stack": stack(line)})

    def span(self, phase: str, name: str, start: float, end: float, thread: int = MAIN) -> None:
        times = {"start": ns(start), "end": ns(end)}
        self.spans.append({"thread": thread, "phase": phase, "name": name, **times, "file": HERE, "line": 70})

    def load(self, folder: Path, steps: list[float], name: str = "recording") -> Recorded:
        """As it is read back, with the steps that start at these times; the last is where they end."""
        settling = [steps[0] - 200, steps[0] - 100]
        data = {
            "steps": [ns(step) for step in [*settling, *steps]],
            "thread": MAIN,
            "threads": {str(MAIN): "MainThread", str(OTHER): "WorkerAsyncOutputCopy"},
            "spans": self.spans,
            "calls": self.calls,
            "reads": [],
            "simulated": False,
        }
        files = {"recording": str(folder / f"{name}.json"), "trace": str(folder / f"{name}.trace.json")}
        Path(files["recording"]).write_text(json.dumps(data))
        Path(files["trace"]).write_text(json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": self.events}))
        return load(files)


def ns(us: float) -> int:
    return BASE + round((1e6 + us) * 1000)
