"""A soak from outside: stock says what is right, then the subject serves the same for as long as one likes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import child
from benchmarks.arms import Arm, Plugin
from benchmarks.loads import Load

_LEG_SECONDS = 60.0


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
) -> Iterator[dict[str, Any]]:
    """Run it, in legs of about a minute: what was seen before a time limit or a crash is then not lost.

    Args:
        soak: what to run.
        plugin: the plugin in the subject; stock, held to itself, shows what noise is.
        seconds: for how long requests arrive.
        seed: of arrivals and delays.
        control: how to break the plugin on purpose, a key of `soak.CONTROLS`; None: not at all.
        envs: by vLLM release, a shell file to source first, or a Python.
        cache: folder for directories of models and for logs.
        report: told a line for each engine.

    Yields:
        The verdict of all legs so far, with what ran, after each.

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
            about = {
                "soak": json.loads(json.dumps(asdict(soak))),
                "vllm": (facts := engine.ask("describe"))["vllm"],
                "plugin": plugin.value,
                "facts": facts,
                "seed": seed,
                "control": control,
            }
            legs: list[dict[str, Any]] = []
            while (left := seconds - sum(leg["seconds"] for leg in legs)) > 0 or not legs:
                legs.append(
                    engine.ask(
                        "soak",
                        load=soak.load.name,
                        file=file,
                        seconds=min(left, _LEG_SECONDS),
                        seed=seed + len(legs),
                        control=None if legs else control,  # what is broken stays so
                    )
                )
                yield about | together(legs)


def together(legs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One verdict of those of one engine's legs, in their order."""
    return {
        "outcomes": _added(leg["outcomes"] for leg in legs),
        "tokens": sum(leg["tokens"] for leg in legs),
        "widest_swap": max(leg["widest_swap"] for leg in legs),
        "first_different": [each for leg in legs for each in leg["first_different"]][:10],
        "seconds": round(sum(leg["seconds"] for leg in legs), 1),
        "delays": _added(leg["delays"] for leg in legs),
        "fallbacks": legs[-1]["fallbacks"],  # counted since the engine's start
    }


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found
