"""Host time that the plugin adds to a step: vLLM's metadata class as it is, and with the host views grafted on.

    python benchmarks/host_time.py [--json FILE] [--rounds N]

Stock and grafted alternate in one process (ABBA), each round timing many operations; what is printed is the median of
the rounds' ratios, their spread, and the difference in microseconds. A step of vLLM constructs one such object per KV
cache group, and calls `unpadded` at most once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_async_spec.vllm_plugin.ledger import load_ledger
from vllm_async_spec.vllm_plugin.plugin import IMPLEMENTATIONS
from vllm_async_spec.vllm_plugin.transaction import Transaction

CALLS = 3000


def metadata_module() -> Any:
    """The module that defines vLLM's class, which 0.14 moved."""
    for name in ("vllm.v1.attention.backend", "vllm.v1.attention.backends.utils"):
        module = importlib.import_module(name)
        cls = getattr(module, "CommonAttentionMetadata", None)
        if cls is not None and cls.__module__ == name:
            return module
    raise SystemExit("this vLLM has no CommonAttentionMetadata")


def operations(cls: Any, batch: int = 32) -> dict[str, Callable[[], Any]]:
    """What a step does to the class, on a speculative batch of `batch` requests."""
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


def patches_of(module: Any) -> list[Callable[[Transaction, Any], None]]:
    """How this vLLM's class is patched, in the ledger's order."""
    applied = []
    for spec in load_ledger():
        for target in spec.targets:
            if target.module == module.__name__ and target.qualname.startswith("CommonAttentionMetadata"):
                owner = module
                for part in target.qualname.split("."):
                    owner = getattr(owner, part)
                if IMPLEMENTATIONS[spec.name].unneeded(owner) is None:
                    applied.append(IMPLEMENTATIONS[spec.name].apply)
    return applied


def microseconds(operation: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        operation()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()

    import vllm

    module = metadata_module()
    cls, patches = module.CommonAttentionMetadata, patches_of(module)
    times: dict[str, dict[str, list[float]]] = {name: {"stock": [], "grafted": []} for name in operations(cls)}

    def measure(kind: str) -> None:
        transaction = Transaction()
        for patch in patches if kind == "grafted" else []:
            patch(transaction, module)
        for name, operation in operations(cls).items():
            times[name][kind].append(microseconds(operation))
        transaction.roll_back()

    for _ in range(options.rounds // 2):
        for kind in ("stock", "grafted", "grafted", "stock"):
            measure(kind)

    rows = {}
    table = Table("operation", "stock", "grafted", "ratio", "added", title=f"vLLM {vllm.__version__}, microseconds")
    for name, kinds in times.items():
        stock, grafted = (statistics.median(kinds[kind]) for kind in ("stock", "grafted"))
        ratios = [b / a for a, b in zip(kinds["stock"], kinds["grafted"], strict=True)]
        rows[name] = {
            "stock_us": stock,
            "grafted_us": grafted,
            "added_us": grafted - stock,
            "ratio": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
            "n": len(ratios),
        }
        spread = f"{rows[name]['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        table.add_row(name, f"{stock:.2f}", f"{grafted:.2f}", spread, f"{grafted - stock:+.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"vllm": vllm.__version__, "operations": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
