"""What vLLM's benchmark client returns, made up."""

from typing import Any


def raw_result(requests: int, speed: float, *, failed: int = 0) -> dict[str, Any]:
    errors = ["Traceback:\n  ...\nConnectionResetError: lost"] * failed + [""] * (requests - failed)
    raw: dict[str, Any] = {"completed": requests - failed, "failed": failed, "duration": 1.0, "errors": errors}
    raw |= {"total_output_tokens": 10 * requests, "request_throughput": speed, "request_goodput": speed}
    raw |= {"output_throughput": 10 * speed, "spec_decode_acceptance_length": 2.5}
    latencies = {"ttft": 30, "tpot": 3, "itl": 6}
    return raw | {
        f"p{share}_{name}_ms": share / 50 * base / speed for name, base in latencies.items() for share in (50, 90, 99)
    }
