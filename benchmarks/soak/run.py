"""The parent process of a soak: stock gives the expected tokens, then the subject serves the same requests."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import child
from benchmarks.arms import Plugin
from benchmarks.soak.engine import NEAR, NOTED
from benchmarks.soak.soaks import Soak

_LEG_SECONDS = 60.0
_NOISE_SECONDS = 15.0


class SoakError(RuntimeError):
    """A soak can't give a verdict; the message says why and what to do."""


def allowed(noise: Mapping[str, Any]) -> float:
    """How close two tokens must be for a swap to be forgiven, given stock's verdict on itself with `near` of `NOTED`.

    Twice stock's widest swap, because stock has fewer swaps than the subject will have.

    Raises:
        SoakError: stock differs too much from itself for any verdict.
    """
    apart: int = noise["outcomes"]["different"]
    widest: float = noise["widest_swap"]
    if apart or 2 * widest > NOTED:
        further = f", and in {apart} requests by more than {NOTED}" if apart else ""
        raise SoakError(
            f"stock differs from itself by up to {widest:.3f}{further}, so this soak can't show whether the plugin is "
            f"wrong; take a soak of another shape (requests by gap: {noise['gaps']})"
        )
    return max(NEAR, 2 * widest)


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
    """Run a soak in legs of about a minute, so that a time limit or a crash loses only the last leg.

    After each leg yields the verdict of all legs so far, with the facts of the run.

    Args:
        plugin: the plugin in the subject; stock, compared with itself, shows the noise.
        seconds: for how long requests arrive.
        seed: of arrivals and delays.
        control: how to break the plugin on purpose, a key of `engine.CONTROLS`; None: not at all.
        envs: by vLLM release, a shell file to source first, or a Python.
        cache: folder for directories of models and for logs.
        report: takes a line of progress for each engine.

    Raises:
        ChildError: an engine does not start, or dies.
        SoakError: stock differs too much from itself, see `allowed`.
    """
    env, models = envs.get(soak.subject.release or ""), cache / "models"
    with tempfile.TemporaryDirectory() as scratch:
        file = str(Path(scratch) / "expected.json")
        subject = replace(soak.subject, plugin=plugin)
        near, noise = NEAR, None
        log = cache / "logs" / f"soak-{soak.name}-stock.log"
        with child.start(soak.oracle, (soak.load,), audit=False, env=env, models=models, log=log) as engine:
            engine.wait_until_ready()
            count = engine.ask("expect", load=soak.load.name, file=file)["requests"]
            report(f"stock has generated the expected tokens of {count} requests")
            if soak.noisy:
                noise = engine.ask(
                    "soak", load=soak.load.name, file=file, seconds=_NOISE_SECONDS, seed=seed, control=None, near=NOTED
                )
                near = allowed(noise)
                report(
                    f"stock differs from itself by up to {noise['widest_swap']:.3f}, so up to {near:.3f} is a near tie"
                )
        log = cache / "logs" / f"soak-{soak.name}.log"
        with child.start(subject, (soak.load,), audit=False, env=env, models=models, log=log) as engine:
            engine.wait_until_ready()
            facts = engine.ask("describe")
            about = {
                "soak": json.loads(json.dumps(asdict(soak))),
                "vllm": facts["vllm"],
                "plugin": plugin.value,
                "facts": facts,
                "seed": seed,
                "control": control,
                "near": near,
                "noise": noise,
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
                        control=None if legs else control,  # a breakage outlasts its leg
                        near=near,
                    )
                )
                yield about | together(legs)


def together(legs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the verdicts of one engine's legs, in their order."""
    return {
        "outcomes": _added(leg["outcomes"] for leg in legs),
        "tokens": sum(leg["tokens"] for leg in legs),
        "widest_swap": max(leg["widest_swap"] for leg in legs),
        "first_different": [each for leg in legs for each in leg["first_different"]][:10],
        "gaps": _added(leg["gaps"] for leg in legs),
        "seconds": round(sum(leg["seconds"] for leg in legs), 1),
        "delays": _added(leg["delays"] for leg in legs),
        "fallbacks": legs[-1]["fallbacks"],  # counted since the engine's start
        "prepared": legs[-1]["prepared"],  # since the first leg's
    }


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)  # unlike `+`, keeps zero counts
    return dict(found)
