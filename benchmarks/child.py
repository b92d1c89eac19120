"""The process of one arm's engine: its command line and its environment."""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Plugin
from benchmarks.caches import CACHE_ROOT
from benchmarks.loads import Load
from vllm_async_spec import json_child

ROOT = Path(__file__).resolve().parents[1]

_MODES = {Plugin.STOCK: {}, Plugin.NOOP: {"VLLM_ASYNC_SPEC": "off"}, Plugin.ON: {"VLLM_ASYNC_SPEC": "auto"}}
_START_SECONDS, _ANSWER_SECONDS = 600.0, 900.0


class ChildError(RuntimeError):
    """The engine's process failed; the message says why, and where its log is."""


def start(
    arm: Arm,
    loads: Sequence[Load],
    *,
    audit: bool,
    env: Path | None,
    models: Path,
    log: Path,
    module: str = "benchmarks.engine",
    more: Mapping[str, Any] | None = None,
    limit_s: float = float("inf"),
) -> contextlib.AbstractContextManager[json_child.Child]:
    """Run the process of an arm's engine while the context lasts.

    Args:
        audit: whether it can be asked for audits.
        env: a shell file to source first, or another Python; None for this one.
        models: folder for the directories of models.
        module: the module that serves the commands, and takes the setup.
        more: further parts of the setup.
        limit_s: most seconds until it is ready, and until it answers.
    """
    setup = {"arm": arm.to_dict(), "loads": [asdict(load) for load in loads], "models": str(models.resolve())}
    setup |= dict(more or {})
    return json_child.start(
        [*interpreter(env), "-m", module, json.dumps(setup)],
        log=log,
        env=environment(arm, os.environ, audit=audit),
        fail=lambda why: ChildError(f"the engine of {arm.name!r} failed: {why}"),
        cwd=ROOT,
        ready_s=min(_START_SECONDS, limit_s),
        answer_s=min(_ANSWER_SECONDS, limit_s),
    )


def interpreter(env: Path | None) -> list[str]:
    """The beginning of a command line that runs Python in an environment."""
    if env is None:
        return [sys.executable]
    if env.name.startswith("python"):
        return [str(env)]
    return ["bash", "-c", 'source "$0" && exec python3 "$@"', str(env)]


def environment(arm: Arm, inherited: Mapping[str, str], *, audit: bool = False) -> dict[str, str]:
    """Environment of an arm's process: settings of vLLM and of this project come from the arm, not from the caller.

    The place of vLLM's cache is the caller's, so that a machine can bring compiled kernels along.
    """
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    runner = {} if arm.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": "1" if arm.runner == "V2" else "0"}
    # Forked ranks would inherit what this process has imported and started.
    ranks = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} if arm.gpus > 1 else {}
    agent = {"VLLM_ASYNC_SPEC_AUDIT": "1"} if audit else {}
    kept = {
        name: value
        for name, value in inherited.items()
        if name == CACHE_ROOT or not name.startswith(("VLLM_", "ASYNC_SPEC_"))
    }
    return kept | common | runner | ranks | agent | _MODES[arm.plugin] | dict(arm.environment)
