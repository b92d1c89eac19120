"""Host time that the plugin adds to a step: vLLM's metadata class as it is, and with the host views grafted on.

    python -m benchmarks host-time [--json FILE] [--rounds N]

Stock and grafted alternate in one process (ABBA), and each round times many operations. The output is the median of the
rounds' ratios, their spread, and the difference in microseconds. A step of vLLM constructs one such object per KV cache
group, and calls `unpadded` at most once.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from benchmarks.present import Grid
from vllm_async_spec.patching import Transaction, temporarily
from vllm_async_spec.vllm_plugin.ledger import load_ledger
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

CALLS = 3000


def metadata_module() -> Any:
    """The module that defines vLLM's class, which 0.14 moved."""
    for name in ("vllm.v1.attention.backend", "vllm.v1.attention.backends.utils"):
        module = importlib.import_module(name)
        cls = getattr(module, "CommonAttentionMetadata", None)
        if cls is not None and cls.__module__ == name:
            return module
    raise SystemExit("this vLLM has no CommonAttentionMetadata")


def operations(cls: Any) -> dict[str, Callable[[], Any]]:
    """A step's operations on the class, for a speculative batch of 32 requests."""
    batch = 32
    starts = torch.arange(batch + 1, dtype=torch.int32) * 4
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.full((batch,), 100, dtype=torch.int32),
        "num_reqs": batch,
        "num_actual_tokens": batch * 4,
        "max_query_len": 4,
        "max_seq_len": 100,
        "block_table_tensor": torch.zeros(batch, 8, dtype=torch.int32),
        "slot_mapping": torch.zeros(batch * 4, dtype=torch.int64),
    }
    if "seq_lens_cpu" in cls.__dataclass_fields__:
        fields |= {"seq_lens_cpu": fields["seq_lens"], "num_computed_tokens_cpu": fields["seq_lens"]}
    made = cls(**fields)
    return {"construct": lambda: cls(**fields), "unpadded": lambda: made.unpadded(batch * 4, batch)}


def patches_of(module: Any, release: str) -> list[Callable[[Transaction, Any], None]]:
    """How the class in this module of a vLLM release is patched, in the ledger's order."""
    return [
        IMPLEMENTATIONS[spec.name].apply
        for spec in load_ledger()
        for target in spec.targets
        if spec.covers(release)
        if target.module == module.__name__ and target.qualname.startswith("CommonAttentionMetadata")
    ]


def microseconds(operation: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        operation()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(rounds: int) -> dict[str, Any]:
    """The result file: microseconds of each operation, stock and grafted, over `rounds` rounds."""
    import vllm

    module = metadata_module()
    cls, patches = module.CommonAttentionMetadata, patches_of(module, vllm.__version__)
    times: dict[str, dict[str, list[float]]] = {name: {"stock": [], "grafted": []} for name in operations(cls)}
    for _ in range(rounds // 2):
        for kind in ("stock", "grafted", "grafted", "stock"):
            with temporarily() as transaction:
                for patch in patches if kind == "grafted" else []:
                    patch(transaction, module)
                for name, operation in operations(cls).items():
                    times[name][kind].append(microseconds(operation))
    return {"vllm": vllm.__version__, "operations": {name: _row(**kinds) for name, kinds in times.items()}}


def table(found: dict[str, Any]) -> Table:
    rows = []
    for name, row in found["operations"].items():
        low, high = row["ratio_spread"]
        ratio = f"{row['ratio']:.2f} ({low:.2f}-{high:.2f})"
        rows.append((name, f"{row['stock_us']:.2f}", f"{row['grafted_us']:.2f}", ratio, f"{row['added_us']:+.2f}"))
    head = ("operation", "stock", "grafted", "ratio", "added")
    return Grid(head, rows).table(f"vLLM {found['vllm']}, microseconds")


def _row(stock: list[float], grafted: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(stock, grafted, strict=True)]
    return {
        "stock_us": statistics.median(stock),
        "grafted_us": statistics.median(grafted),
        "added_us": statistics.median(grafted) - statistics.median(stock),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "n": len(ratios),
    }
