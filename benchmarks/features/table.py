"""The table of cases, from their results: one row a case, also for cases that have not run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.features.cases import FEATURES, STOCK_AGAIN, Feature
from benchmarks.present import Grid
from benchmarks.stored import exists, read_json

NOT_RUN = "not run"
_HEAD = ("feature", "drafts", "vLLM", "tokens", "with the device late", "seen", "waits for exact counts")


def feature_grid(results: Path) -> Grid:
    rows = []
    for feature in FEATURES.values():
        path = results / f"features-{feature.name}.json"
        found = read_json(path) if exists(path) else None
        rows.append(_row(feature, found))
    return Grid(_HEAD, rows)


def _row(feature: Feature, found: Mapping[str, Any] | None) -> tuple[str, ...]:
    case = (f"`{feature.name}`: {feature.about}", feature.method.value)
    if found is None:
        return (*case, "", NOT_RUN, NOT_RUN, "", "")
    head = (*case, str(found["vllm"]))
    if found["verdict"] == "refused by vLLM":
        return (*head, f"vLLM refuses it: “{found['refused']}”", "", "", "")
    if "outcomes" not in found:
        return (*head, f"**not served**: {'; '.join(found['why'])}", "", "", "")
    outcomes = found["outcomes"]
    late = _tokens(outcomes["late"]) if "late" in outcomes else NOT_RUN
    seen = "; ".join(one["saw"] if one["held"] else f"**{one['saw']}**" for one in found["seen"]["plugin"])
    waits = ", ".join(f"{reason} {count}" for reason, count in found["fallbacks"].items()) or "none"
    if not found["patch"].startswith("applied"):
        waits = f"patch {found['patch']}"
    elif found["says"]:
        waits = f"vLLM's own runner: “{found['says']}”"
    if (again := outcomes.get(STOCK_AGAIN)) and (unlike := again["outcomes"]["different"]):
        seen += f"; stock itself differs in {unlike} if log-probabilities are requested"
    if found["verdict"] == "wrong":
        seen = f"**{'; '.join(found['why'])}**"
    return (*head, _tokens(outcomes["plugin"]), late, seen, waits)


def _tokens(verdict: Mapping[str, Any]) -> str:
    """Such as `24 of 24 as stock` or `22 of 24 as stock, 1 near tie (0.012), **1 different**`."""
    outcomes = verdict["outcomes"]
    parts = [f"{outcomes['same']} of {sum(outcomes.values())} as stock"]
    if swapped := outcomes["swapped"]:
        parts.append(f"{swapped} near tie{'s' * (swapped > 1)} ({verdict['widest_swap']:.3f})")
    if different := outcomes["different"]:
        parts.append(f"**{different} different**")
    return ", ".join(parts)
