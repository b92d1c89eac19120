"""Whether vLLM's caches of compiled code are cold or warm for an arm; a start with cold caches takes minutes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Plugin, tensor_ranks

CACHE_ROOT = "VLLM_CACHE_ROOT"
"""vLLM's environment variable of the folder of its caches."""
_LARGEST_GRAPH = 512
"""Most tokens of a CUDA graph, by vLLM's default."""


def compiles_alone(arm: Mapping[str, Any], *, served: bool = False) -> bool:
    """Whether no other arm shares compiled code with `arm`: its key has `VLLM_PLUGINS`, which only stock sets.

    An engine in this process forgets it (`facts.load_plugins`). Servers and several ranks are processes of their own.
    """
    return bool(arm["plugin"] == Plugin.STOCK and (served or tensor_ranks(arm["engine"]) > 1))


def state(arm: Mapping[str, Any], *, served: bool = False, longest: int = 0) -> str:
    """Of an arm, given as plain data: `warm`, if it has started with these caches; `shared`, if only another arm that
    compiles the same code has; or `cold`.

    Args:
        served: whether its engine is a server's.
        longest: most tokens of a request, by which an engine is sized whose arguments do not say its own length.
    """
    mark = _mark(arm, served, longest)
    return "warm" if mark.is_dir() else "shared" if mark.parent.is_dir() else "cold"


def waves(arms: Sequence[Arm], *, served: bool = False, longest: int = 0) -> list[list[Arm]]:
    """Arms that may start at once: of those that compile the same code and find none, one goes first."""
    first: dict[Path, Arm] = {}
    for arm in arms:
        if state(arm.to_dict(), served=served, longest=longest) == "cold":
            first.setdefault(_mark(arm.to_dict(), served, longest).parent, arm)
    rest = [arm for arm in arms if arm not in first.values()]
    return [wave for wave in ([*first.values()], rest) if wave]


def mark(arm: Mapping[str, Any], *, served: bool = False, longest: int = 0) -> None:
    """Note that the arm has started. The mark lies in vLLM's cache, so that both go together.

    Where nothing can be written, vLLM keeps no caches either, and the next start is cold again.
    """
    with contextlib.suppress(OSError):
        _mark(arm, served, longest).mkdir(parents=True, exist_ok=True)


def _mark(arm: Mapping[str, Any], served: bool, longest: int) -> Path:
    root = Path(os.environ.get(CACHE_ROOT) or Path.home() / ".cache" / "vllm")
    engine = {name: value for name, value in arm["engine"].items() if name != "seed"}  # vLLM's key has none
    # vLLM's key has the longest sequence and the sizes of CUDA graphs. It has no number of draft tokens, but sizes are
    # rounded to multiples of a request's tokens in a step: 2, 4 and 8 divide them already.
    tokens = 1 + int(arm["draft_tokens"])
    rounded = 0 if _LARGEST_GRAPH % tokens == 0 else tokens
    declared = [engine, arm["method"], arm["runner"], longest, rounded, compiles_alone(arm, served=served)]
    code = hashlib.sha256(json.dumps(declared, sort_keys=True, default=str).encode()).hexdigest()[:12]
    release = arm["release"] or "installed"
    return root / "async-spec-benchmarks" / f"{release}-{arm['shape']}-{code}" / Plugin(arm["plugin"]).value
