"""The parent process of cases: stock gives the expected tokens, the plugin serves the same, and each case has a result.

Cases with equal engines share one engine, which starts once. An engine that dies fails only the case that it served.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import child, runner_on_cpu
from benchmarks.arms import Arm, Plugin
from benchmarks.child import ChildError
from benchmarks.features.cases import LOAD, STOCK_AGAIN, Feature
from benchmarks.features.checks import Served, check
from benchmarks.features.files import write_adapter, write_tokenizer
from benchmarks.plans.engines import ATTENTIVE, BESIDE_OTHERS, CPU_ENGINE, CPU_ENVIRONMENT
from benchmarks.shapes import find_shape
from benchmarks.soak.controls import RUNNER_RELEASES
from benchmarks.soak.engine import NEAR, Expected, Verdict
from vllm_async_spec.json_child import Child

_GPU = {
    "dtype": "float16",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    **BESIDE_OTHERS,
    "attention_config": {"backend": "FLASH_ATTN"},
    "num_gpu_blocks_override": 1024,
    # Near ties are judged after penalties and masks, by the distribution that a token is chosen from.
    "logprobs_mode": "processed_logprobs",
}
_CPU = CPU_ENGINE | {"logprobs_mode": "processed_logprobs"}
_GPU_ONLY = {"attention_config", "block_size"}
_ASYNC_SENTENCE = re.compile(r"Async(?:hronous)? scheduling (?:is )?not (?:supported|compatible).*")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    release: str | None
    """The vLLM release that it must be; None for that of this environment."""
    env: Path | None
    """A shell file to source first, or a Python; None for this one."""
    cache: Path
    """Folder for directories of models and for logs."""
    cpu: bool = False
    """Whether to use a CPU engine: no delays, and vLLM's own choice of backend and of scheduling."""


@dataclass(slots=True)
class Seen:
    """The result of one case with one arm."""

    facts: dict[str, Any] | None = None
    noted: Served | None = None
    served: Served | None = None
    late: Served | None = None
    error: str | None = None
    says: str | None = None
    """vLLM's sentence on why it schedules synchronously, if it does."""


def run_features(
    features: Sequence[Feature], place: Place, *, plugin: Plugin, control: str | None, report: Report
) -> Iterator[tuple[Feature, dict[str, Any]]]:
    """Run cases, stock and then the subject; yield each with its result, as soon as its group is done.

    Args:
        plugin: the plugin in the subject; stock, compared with itself, shows the noise.
        control: how to break the subject on purpose, a key of `soak.engine.CONTROLS`; None: not at all.
        report: takes a line of progress for each engine.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in features:
        groups.setdefault(repr(arm_of(feature, place, Plugin.STOCK)), []).append(feature)
    for group in groups.values():
        stock = _run_arm(group, place, Plugin.STOCK, None, report, name="stock", oracle=True)
        subject = _run_arm(group, place, plugin, control, report, name=plugin.value, oracle=False)
        for feature in group:
            found = judge(feature, stock[feature.name], subject[feature.name], place, plugin)
            yield feature, found | {"plugin": plugin.value, "control": control}


def arm_of(feature: Feature, place: Place, plugin: Plugin) -> Arm:
    engine: dict[str, Any] = dict(feature.engine)
    if feature.tokenizer:
        folder = write_tokenizer(place.cache / "models" / "byte-tokenizer")
        engine |= {"tokenizer": str(folder.resolve()), "skip_tokenizer_init": False}
    if place.cpu:
        engine = {name: value for name, value in engine.items() if name not in _GPU_ONLY}
        engine["block_size"] = 32  # vLLM's default is 128, which small cases do not fill
        if "num_gpu_blocks_override" in engine:
            engine["num_gpu_blocks_override"] //= 2
    elif feature.asynchronous:
        engine["async_scheduling"] = True
    return Arm(
        "features",
        feature.shape,
        plugin=plugin,
        release=place.release,
        runner="V1",
        method=feature.method,
        acceptance=ATTENTIVE,
        engine=(_CPU if place.cpu else _GPU) | engine,
        environment=_cpu_environment(plugin) if place.cpu else {},
    )


def _cpu_environment(plugin: Plugin) -> Mapping[str, str]:
    """Environment of an engine on a CPU: with the plugin on, the V1 runner is changed as on a GPU."""
    return CPU_ENVIRONMENT | runner_on_cpu.ENVIRONMENT if plugin is Plugin.ON else CPU_ENVIRONMENT


def _run_arm(
    group: Sequence[Feature],
    place: Place,
    plugin: Plugin,
    control: str | None,
    report: Report,
    *,
    name: str,
    oracle: bool,
) -> dict[str, Seen]:
    """Serve the cases of a group with one engine, and start another one when it dies."""
    found = {feature.name: Seen() for feature in group}
    left = list(group)
    while left:
        log = place.cache / "logs" / f"features-{left[0].name}-{name}.log"
        with contextlib.ExitStack() as stack:
            try:
                engine, facts = _start(left[0], place, plugin, log, stack)
            except ChildError as error:
                for feature in left:  # all cases of a group start the same engine
                    found[feature.name].error = str(error)
                report(f"{', '.join(feature.name for feature in left)}: {error}")
                break
            while left:
                feature = left.pop(0)
                seen = found[feature.name]
                seen.facts, seen.says = facts, _sentence(log)
                try:
                    _serve(engine, feature, place, seen, control, oracle=oracle)
                except ChildError as error:
                    seen.error = str(error)
                    break  # the next case gets a new engine
        report(f"{name}: {feature.name}" + (f": {seen.error}" if seen.error else " served"))
    return found


def _start(
    feature: Feature, place: Place, plugin: Plugin, log: Path, stack: contextlib.ExitStack
) -> tuple[Child, dict[str, Any]]:
    arm, models = arm_of(feature, place, plugin), place.cache / "models"
    engine = stack.enter_context(child.start(arm, (LOAD,), audit=False, env=place.env, models=models, log=log))
    engine.wait_until_ready()
    return engine, engine.ask("describe")


def _serve(engine: Child, feature: Feature, place: Place, seen: Seen, control: str | None, *, oracle: bool) -> None:
    adapter = None
    if any(ask.adapter for ask in feature.asks()):
        folder = place.cache / "models" / f"adapter-{feature.shape}"
        adapter = str(write_adapter(folder, find_shape(feature.shape).target).resolve())

    def serve(*, noted: bool = False, late: bool = False) -> Served:
        return engine.ask("feature", name=feature.name, noted=noted, late=late, control=control, adapter=adapter)

    if oracle:
        seen.noted = serve(noted=not feature.sampled)
    seen.served = serve()
    if not oracle and not place.cpu:
        seen.late = serve(late=True)


def _sentence(log: Path) -> str | None:
    """vLLM's sentence on why it schedules synchronously, if it does."""
    said = _ASYNC_SENTENCE.search(log.read_text(errors="replace"))
    return said[0].strip() if said else None


def judge(feature: Feature, stock: Seen, subject: Seen, place: Place, plugin: Plugin) -> dict[str, Any]:
    """The result of a case.

    Returns:
        `verdict`: `as stock`, `refused by vLLM`, or `wrong` with its reasons in `why`; and the comparisons and checks.
    """
    made: dict[str, Any] = {
        "feature": feature.name,
        "about": feature.about,
        "method": feature.method.value,
        "vllm": (stock.facts or subject.facts or {}).get("vllm") or place.release,
        "facts": subject.facts,
        "says": subject.says,
        "errors": {"stock": stock.error, "plugin": subject.error},
    }
    if feature.refused is not None:
        kept = [feature.refused in (seen.error or "") for seen in (stock, subject)]
        why = [] if all(kept) else [f"vLLM should refuse this case with {feature.refused!r}, and did not in every arm"]
        return made | {"verdict": "wrong" if why else "refused by vLLM", "why": why, "refused": feature.refused}
    if stock.noted is None or stock.served is None or subject.served is None:
        why = [error for error in (stock.error, subject.error) if error]
        return made | {"verdict": "wrong", "why": why}
    runs = {STOCK_AGAIN: stock.served, "plugin": subject.served, "late": subject.late}
    expected = [Expected(each["tokens"], each.get("behind", [{}] * len(each["tokens"]))) for each in _said(stock.noted)]
    outcomes = {name: _compare(expected, served, stock.served) for name, served in runs.items() if served}
    gaps = {name: _widest_gap(stock.served, served) for name, served in runs.items() if served}
    seen = {name: check(feature, served) for name, served in runs.items() if served}
    waits: Counter[str] = Counter(subject.served["fallbacks"]) + Counter((subject.late or {}).get("fallbacks"))
    patch = subject.served["patch"]
    why = [subject.error] if subject.error else []
    why += _why_unlike(outcomes, gaps)
    failed = [(name, one) for name, found in seen.items() for one in found if not one["held"]]
    why += [f"{one['what']} in {name}: {one['saw']}" for name, one in failed]
    if not place.cpu:
        why += _why_not_ours(feature, subject, waits, patch, plugin, place.release)
    return made | {
        "verdict": "wrong" if why else "as stock",
        "why": why,
        "outcomes": {name: asdict(verdict) for name, verdict in outcomes.items()},
        "logprob_gaps": gaps,
        "seen": seen,
        "accepted": {name: served["accepted"] for name, served in runs.items() if served},
        "steps": {name: served["steps"] for name, served in runs.items() if served},
        "fallbacks": dict(waits),
        "patch": patch,
    }


def _said(served: Served) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = served["requests"]
    return said


def _compare(expected: Sequence[Expected], served: Served, plain: Served) -> Verdict:
    """Compare `served` with `expected`. A request may also equal `plain`, stock's answer without log-probabilities."""
    verdict = Verdict()
    for index, (one, said, other) in enumerate(zip(expected, _said(served), _said(plain), strict=True)):
        as_plain = served is not plain and said["tokens"] == other["tokens"]
        verdict.add(index, Expected(said["tokens"], []) if as_plain else one, said["tokens"])
    return verdict


def _widest_gap(stock: Served, served: Served) -> float:
    """Largest difference between log-probabilities of the same tokens; 0 if none were requested."""
    return max(
        (
            abs(mine - yours)
            for one, other in zip(_said(stock), _said(served), strict=True)
            if one["tokens"] == other["tokens"]
            for mine, yours in zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=True)
        ),
        default=0.0,
    )


def _why_unlike(outcomes: Mapping[str, Verdict], gaps: Mapping[str, float]) -> Iterator[str]:
    """Differences from stock. Stock's own differences (`STOCK_AGAIN`) are not the plugin's fault."""
    for name, verdict in outcomes.items():
        if verdict.outcomes["different"] and name != STOCK_AGAIN:
            index, place, behind = verdict.first_different[0]
            choice = "not among stock's noted tokens" if behind is None else f"{behind:.3f} behind stock's"
            yield (
                f"{verdict.outcomes['different']} of {sum(verdict.outcomes.values())} requests differ in {name}; "
                f"request {index} differs from token {place} on, by a token {choice}"
            )
    for name, gap in gaps.items():
        if gap > NEAR:
            yield f"log-probabilities of the same tokens are {gap:.3f} apart in {name}"


def _why_not_ours(
    feature: Feature, subject: Seen, waits: Mapping[str, int], patch: str, plugin: Plugin, release: str | None
) -> Iterator[str]:
    """Scheduling, patch state or waits that differ from the case's."""
    assert subject.facts is not None
    if subject.facts["async_scheduling"] is not feature.asynchronous:
        state = "asynchronous" if subject.facts["async_scheduling"] else "synchronous"
        yield f"scheduling was {state}" + (f": {subject.says}" if subject.says else "")
    if plugin is not Plugin.ON or release not in RUNNER_RELEASES:
        return
    if not patch.startswith("applied"):
        yield f"the patch optimistic-runner is {patch}"
    elif set(waits) != ({feature.fallback} if feature.fallback else set()):
        yield f"steps waited for exact counts because of {sorted(waits)}; the expected reason is {feature.fallback!r}"


def in_short(found: Mapping[str, Any]) -> str:
    head = f"{found['feature']}: {found['verdict']}"
    return "; ".join([head, *found["why"]]) if found["why"] else head
