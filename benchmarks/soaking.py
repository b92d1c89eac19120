"""A soak from outside: stock says what is right, then the subject serves the same for as long as one likes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import child
from benchmarks.arms import Arm, Plugin
from benchmarks.loads import Load


@dataclass(frozen=True, slots=True)
class Soak:
    """One engine that is to say what stock says, whatever the delays."""

    name: str
    subject: Arm
    load: Load


def run_soak(
    soak: Soak,
    *,
    plugin: Plugin,
    seconds: float,
    seed: int,
    control: str | None,
    envs: Mapping[str, Path],
    cache: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Run it.

    Args:
        soak: what to run.
        plugin: the plugin in the subject; stock, held to itself, shows what noise is.
        seconds: for how long requests arrive.
        seed: of arrivals and delays.
        control: how to break the plugin on purpose, a key of `soak.CONTROLS`; None: not at all.
        envs: by vLLM release, a shell file to source first, or a Python.
        cache: folder for directories of models and for logs.
        report: told a line for each engine.

    Returns:
        The verdict, with what ran.

    Raises:
        ChildError: an engine does not come up, or dies.
    """
    env, models = envs.get(soak.subject.release or ""), cache / "models"
    with tempfile.TemporaryDirectory() as scratch:
        file = str(Path(scratch) / "expected.json")
        subject = replace(soak.subject, plugin=plugin)
        oracle = replace(soak.subject, name="stock", plugin=Plugin.STOCK)
        log = cache / "logs" / f"soak-{soak.name}-stock.log"
        with child.start(oracle, (soak.load,), audit=False, env=env, models=models, log=log) as engine:
            engine.wait_until_ready()
            count = engine.ask("expect", load=soak.load.name, file=file)["requests"]
            report(f"stock has said what {count} requests get")
        log = cache / "logs" / f"soak-{soak.name}.log"
        with child.start(subject, (soak.load,), audit=False, env=env, models=models, log=log) as engine:
            engine.wait_until_ready()
            facts = engine.ask("describe")
            verdict = engine.ask("soak", load=soak.load.name, file=file, seconds=seconds, seed=seed, control=control)
    found = {
        "soak": json.loads(json.dumps(asdict(soak))),
        "vllm": facts["vllm"],
        "plugin": plugin.value,
        "facts": facts,
        "seed": seed,
    }
    return found | {"control": control} | verdict
