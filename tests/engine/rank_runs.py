"""Engines of several processes, one for each arm, at once: what they served, or the words in which they failed."""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scenario import environment
from watched_start import watched

MARKS = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'vllm-async-spec[cpu]'"
    ),
]
"""Of the tests that run such engines."""
RANKS = Path(__file__).with_name("ranks.py")
STOCK = {"VLLM_PLUGINS": ""}
NEAR = 0.05
"""Difference of the two best log-probabilities below which the sum of a GPU's ranks may go either way."""

_ERROR = re.compile(r"\b(?:[A-Za-z_]\w*(?:Error|Exception)|Value error)(?:: |, )(.+?)(?: \[type=|$)", re.MULTILINE)
_BARE = re.compile(r"^(.+)\n(?:.*\^+\s*\n)?.*\b([A-Za-z_]\w*(?:Error|Exception))[ \t]*$", re.MULTILINE)
"""An error without a message, and the line before it, which is the last of its traceback."""
_PREFIX = re.compile(r"^\([^)]*\) \w+ [\d-]+ [\d:]+ \[[^]]*\]\s*")
_FOLLOWING = ("Engine core", "EngineCore", "WorkerProc", "cancelled", "Cancelled", "Connection", "onnection closed")
"""Parts of the errors that follow from another process's error, whatever that was."""
_DECISION = re.compile(r"asynchronous scheduling is (on|off), decided by ([^:\n]+):")


@dataclass(frozen=True)
class Arm:
    """Variables of an engine's processes, and its options of vLLM's `LLM`."""

    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Found:
    """What an engine left: its log, what it said, which is empty if it failed, and its exit code."""

    def __init__(self, log: str, said: dict[str, Any], code: int = 0) -> None:
        self.log, self.said, self.code = log, said, code

    @property
    def errors(self) -> set[str]:
        """Messages of the errors in the log, without numbers and without the errors that follow from others."""
        said = [*_ERROR.findall(self.log)]
        said += [f"{name} at {_PREFIX.sub('', line).strip()}" for line, name in _BARE.findall(self.log)]
        messages = {re.sub(r"0x[0-9a-f]+|\d+", "N", message.strip()) for message in said}
        return {message for message in messages if not any(part in message for part in _FOLLOWING)}

    @property
    def decisions(self) -> set[tuple[str, str]]:
        """Whether asynchronous scheduling is `on` or `off`, and who decided, as the log says."""
        return set(_DECISION.findall(self.log))


def run(
    folder: Path, models: tuple[Path, Path], options: dict[str, Any], arms: Mapping[str, Arm], script: Path = RANKS
) -> dict[str, Found]:
    """Run one engine for each arm, all at once, and return what became of them; one that hangs fails with its stacks.

    Args:
        folder: for logs and results.
        models: directories of the target and of the draft model.
        options: of vLLM's `LLM`, for all arms; an arm's own come last.
        arms: by name.
        script: of each engine, with the command line of `ranks.main`.
    """
    common = environment() | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for functions sent to the workers
    for ours in ("VLLM_ASYNC_SPEC", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        del common[ours]  # processes as a user has them
    target, draft = map(str, models)
    with ExitStack() as running:
        starts = []
        for name, arm in arms.items():
            command = [sys.executable, script, "--target", target, "--draft", draft, "--out", folder / f"{name}.json"]
            command += ["--options", json.dumps(options | dict(arm.options))]
            starts.append(running.enter_context(watched(command, folder / f"{name}.log", common | arm.variables)))
        codes = [start.wait() for start in starts]
    return {name: _found(folder / name, code) for name, code in zip(arms, codes, strict=True)}


def _found(path: Path, code: int) -> Found:
    said = path.with_name(f"{path.name}.json")
    log = path.with_name(f"{path.name}.log").read_text(encoding="utf-8", errors="replace")
    return Found(log, json.loads(said.read_text()) if said.exists() else {}, code)


def served(found: Found) -> dict[str, Any]:
    assert found.said, f"the engine failed; the end of its log:\n{found.log[-4000:]}"
    return found.said


def differing(stock: dict[str, Any], other: dict[str, Any], near: float) -> list[tuple[int, int]]:
    """Requests whose tokens differ, with the first place that does, unless stock's best two tokens were near there."""
    found = []
    for row, (ours, theirs) in enumerate(zip(other["tokens"], stock["tokens"], strict=True)):
        at = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None and stock["margins"][row][at] >= near:
            found.append((row, at))
    return found


def report(case: str, found: Mapping[str, Found], expected: str = "stock") -> dict[str, Any]:
    """Print, and return, one line of JSON: each arm's start, drafts, and tokens that differ from those of `expected`.

    `apart` has [request, place, margin] of the first tokens that differ by more than a near tie.
    """
    right = found[expected].said
    told: dict[str, Any] = {"case": case, "arms": {}}
    for name, each in found.items():
        said, decisions = each.said, sorted(each.decisions)
        row: dict[str, Any] = {"decided": [f"{state} by {by}" for state, by in decisions]} if decisions else {}
        if said:
            row |= {key: said[key] for key in ("vllm", "start_s", "accepted", "drafts")}
            row |= {key: said["ranks"][0][key] for key in ("runner", "backends", "asynchronous")}
        else:
            row["failed"] = sorted(each.errors)[:4]
        if said and right and name != expected:
            row["requests"] = len(said["tokens"])
            row["differ"] = sum(ours != theirs for ours, theirs in zip(said["tokens"], right["tokens"], strict=True))
            apart = differing(right, said, NEAR)
            row["apart"] = [(request, place, round(right["margins"][request][place], 3)) for request, place in apart]
        told["arms"][name] = row
    print(json.dumps(told))
    return told


def serve_alike(found: Mapping[str, Found]) -> bool:
    """Whether `stock` and `plugin` both served, the same tokens; False if both failed in the same words.

    Raises:
        AssertionError: tokens differ beyond near ties, only one of both failed, or they failed in different words.
    """
    stock, plugin = found["stock"], found["plugin"]
    if stock.said or plugin.said:
        assert differing(served(stock), served(plugin), NEAR) == []
        return True
    assert stock.errors & plugin.errors, f"stock failed with {stock.errors}, the plugin with {plugin.errors}"
    return False
