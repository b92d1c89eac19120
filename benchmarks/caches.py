"""Whether vLLM's caches of compiled code are cold or warm for an arm; a start with cold caches takes minutes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Plugin

CACHE_ROOT = "VLLM_CACHE_ROOT"
"""vLLM's environment variable of the folder of its caches."""


def state(arm: Mapping[str, Any]) -> str:
    """Of an arm, given as plain data: `warm`, if it has started with these caches; `shared`, if only another arm of the
    same engine arguments has; or `cold`."""
    mark = _mark(arm)
    return "warm" if mark.is_dir() else "shared" if mark.parent.is_dir() else "cold"


def same_code(arm: Mapping[str, Any]) -> str:
    """A name that arms share which compile the same code."""
    return _mark(arm).parent.name


def waves(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that may start at once: of those that compile the same code and find none, one goes first."""
    first: dict[str, Arm] = {}
    for arm in arms:
        if state(arm.to_dict()) == "cold":
            first.setdefault(same_code(arm.to_dict()), arm)
    rest = [arm for arm in arms if arm not in first.values()]
    return [wave for wave in ([*first.values()], rest) if wave]


def mark(arm: Mapping[str, Any]) -> None:
    """Note that the arm has started. The mark lies in vLLM's cache, so that both go together.

    Where nothing can be written, vLLM keeps no caches either, and the next start is cold again.
    """
    with contextlib.suppress(OSError):
        _mark(arm).mkdir(parents=True, exist_ok=True)


def _mark(arm: Mapping[str, Any]) -> Path:
    root = Path(os.environ.get(CACHE_ROOT) or Path.home() / ".cache" / "vllm")
    declared = [arm[name] for name in ("engine", "method", "draft_tokens", "runner")]
    engine = json.dumps(declared, sort_keys=True, default=str)
    code = hashlib.sha256(engine.encode()).hexdigest()[:12]
    release = arm["release"] or "installed"
    return root / "async-spec-benchmarks" / f"{release}-{arm['shape']}-{code}" / Plugin(arm["plugin"]).value
