"""What is published of several results: vLLM's defaults, servers, starts; and figures in sentences.

WORDS of a figure in a sentence:

    control BACKEND                speed of the plugin turned off, stock = 1: mean of all results, and interval
    ratios RESULT ARM LOAD         lowest and highest ratio of an arm's speed to the reference's, such as "1.9 to 2.5"
    shorter LATENCY SHARE          served loads in which the plugin's latency is shorter than the reference's, of all
    tokens RESULT ARM              a served arm's requests with other tokens than the reference's, of all compared
    tpot RESULT ARM LOAD SHARE     a served arm's time per output token in ms

LATENCY is ttft, tpot or itl, and SHARE p50, p90 or p99: medians over passes. RESULT and LOAD may have a `*`, but RESULT
of `tpot` may not.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.arms import Plugin, tensor_ranks
from benchmarks.plans.defaults import PUBLISHED, SEVERAL_GPUS, VARIANTS
from benchmarks.present import Grid, notes, ratio, speed
from benchmarks.results import read_result
from benchmarks.serving.results import find_served, read_served, served_files, summarise, unlike
from benchmarks.serving.table import against_grid, compared, halves, serve_grid, serve_notes
from benchmarks.starts import starts_grid
from benchmarks.statistics import paired_ratio
from benchmarks.stored import files
from benchmarks.summary import Row, against

_HEAD = ("vLLM, runner, backend, shape, device", "load, draft tokens", "stock", "noop", "plugin")
_RATIOS = ("noop, stock = 1", "plugin, stock = 1", "plugin, FLASH_ATTN = 1", "turns")
_SERVED = "serve-"


def defaults(results: Path) -> str:
    """Speeds at vLLM's defaults with three draft tokens and short prompts, with what the engines were, and what is
    missing."""
    return _speeds_at_defaults(results, [""])


def variants(results: Path) -> str:
    """The same with other numbers of draft tokens, and after long prompts."""
    return _speeds_at_defaults(results, [suffix for suffix in VARIANTS if suffix])


def _speeds_at_defaults(results: Path, suffixes: Sequence[str]) -> str:
    """Of every result of the plans with one of these ends of their names."""
    asked = {
        which: [suffix for suffix in suffixes if suffix in which.variants] for which in (*PUBLISHED, *SEVERAL_GPUS)
    }
    names = {f"defaults-{which.name}{suffix}" for which, own in asked.items() for suffix in own}
    rows, lines, found = list[Sequence[str]](), list[str](), set[str]()
    noted: dict[str, list[str]] = {}  # results by what is to be said of them
    cells: dict[str, dict[str, Row | None]] = {"stock": {}, "FLASH_ATTN": {}}
    for path in files(results, "defaults-*.json"):
        document = read_result(path)
        if document["plan"]["name"] not in names:
            continue
        found.add(document["plan"]["name"])
        rows += _speeds(document)
        for note in notes(document):
            noted.setdefault(note, []).append(path.stem)
        for other, mine in cells.items():
            mine |= {f"{path.stem} {load}": row.get("ratio") for load, row in _plugin(document, other).items()}
    lines += [f"{', '.join(names)}: {note}" for note, names in noted.items()]
    lines += [_behind(other, mine) for other, mine in cells.items()]
    missing = []
    for which, own in asked.items():
        lacking = [suffix for suffix in own if f"defaults-{which.name}{suffix}" not in found]
        if lacking:
            named = ", ".join(each.strip("-") for each in lacking)
            missing.append(f"{which.name} ({named})" if named else which.name)
    lines += [f"Not measured yet: {'; '.join(missing)}."] * bool(missing)
    return "\n".join([Grid((*_HEAD, *_RATIOS), rows).markdown(), *(f"- {line}" for line in lines), ""])


def _speeds(document: dict[str, Any]) -> list[Sequence[str]]:
    """A row for each load that was measured."""
    plan = document["plan"]
    own = {(row["load"], row["arm"]): row for row in document["summary"]}
    equals = _plugin(document, "FLASH_ATTN")
    facts = next((turn["facts"] for turn in document["turns"] if "facts" in turn), None)
    rows: list[Sequence[str]] = []
    for load in (each["name"] for each in plan["loads"]):
        arms = [own.get((load, arm)) for arm in ("stock", "noop", "plugin")]
        if facts is not None and any(arms):
            first, engine = plan["arms"][0], plan["arms"][0]["engine"]
            head = f"{facts['vllm']}, {facts['runner']}, {_backend(plan)}, {first['shape']}, {devices(facts, engine)}"
            ratios = [ratio(row) if row else "-" for row in (*arms[1:], equals.get(load))]
            speeds = [speed(row) if row else "-" for row in arms]
            turns = str(max(row["turns"] for row in arms if row))
            graphs = engine.get("max_cudagraph_capture_size")
            asked = f"{load}, {first['draft_tokens']}" + (f", graphs up to {graphs:,} tokens" if graphs else "")
            rows.append((head, asked, *speeds, *ratios, turns))
    return rows


def _backend(plan: Mapping[str, Any]) -> str:
    """The attention backend that a plan is for."""
    engine = plan["arms"][0]["engine"]
    backend: str = engine.get("attention_backend") or engine["attention_config"]["backend"]
    return backend


def runners(results: Path) -> str:
    """Speeds of the V1 runner with the plugin beside the V2 runner's, of every result that has both."""
    head = ("vLLM, shape, device", "load", "V1, stock", "V1, plugin", "V2, stock", "V1 plugin, V2 = 1", "turns")
    rows = list[Sequence[str]]()
    for path in files(results, "v1-*.json"):
        document = read_result(path)
        found = {(row["load"], row["arm"]): row for row in document["summary"]}
        for load, beside in _plugin(document, "V2").items():
            if (load, "V2") in found:  # some ran without it
                facts = next(turn["facts"] for turn in document["turns"] if "facts" in turn)
                first = document["plan"]["arms"][0]
                engine = f"{facts['vllm']}, {first['shape']}, {devices(facts, first['engine'])}"
                speeds = (speed(found[load, arm]) if (load, arm) in found else "-" for arm in ("stock", "plugin", "V2"))
                rows.append((engine, load, *speeds, ratio(beside), str(beside["turns"])))
    return Grid(head, rows).markdown()


def devices(facts: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """The GPUs of an engine, such as `H200` or `2 H100`."""
    ranks, name = tensor_ranks(engine), facts["hardware"]["device"].removeprefix("NVIDIA ")
    model = re.sub(r" \d+GB.*", "", name)  # of "H100 80GB HBM3"
    return model if ranks == 1 else f"{ranks} {model}"


def _plugin(document: dict[str, Any], other: str) -> dict[str, Row]:
    """The plugin's rows by load, compared with `other`; none if the result has no such arm."""
    if all(arm["name"] != other for arm in document["plan"]["arms"]):
        return {}
    return {row["load"]: row for row in against(document, other)["summary"] if row["arm"] == "plugin"}


def _behind(other: str, cells: Mapping[str, Row | None]) -> str:
    """A sentence that names the cells whose ratio is below one with its whole interval."""
    slower = [name for name, found in cells.items() if found and found.get("high", 1) < 1]
    return f"The plugin is slower than {other} by more than noise in: {', '.join(slower) or 'no cell'}."


def served(results: Path) -> str:
    """Every result of a served plan: a section with its figure, its tables and its notes."""
    parts, found = [], set[str]()
    for path in served_files(results):
        document = read_served(path)
        plan = document["plan"]
        if all(arm["shape"].startswith("tiny") for arm in plan["arms"]):
            continue  # a CPU's
        found.add(plan["name"])
        parts.append(f"## {path.stem.removeprefix(_SERVED)}\n\n{plan['about']}.\n\n{served_table(document, path.stem)}")
    missing = [which.name for which in (*PUBLISHED, *SEVERAL_GPUS) if f"{_SERVED}{which.name}" not in found]
    return "\n".join([*parts, *[f"Not measured yet: {', '.join(missing)}.\n"] * bool(missing)])


def served_table(document: dict[str, Any], name: str) -> str:
    """The figure of a served result, if it has two request rates, its tables and its notes, as Markdown."""
    rates = {row["rate"] for row in summarise(document)} - {None}
    arms = {run["arm"] for run in document["measured"]}
    parts = [f"![TPOT against the request rate](assets/results/{name}.svg)\n"] * (len(rates) > 1)
    parts += [each.markdown() for each in halves(serve_grid(document))]
    lines = serve_notes(document)
    if {"plugin", "FLASH_ATTN"} <= arms:
        parts.append(against_grid(document, "plugin", "FLASH_ATTN").markdown())
    for other in ("stock", "FLASH_ATTN"):
        if {"plugin", other} <= arms:
            rows = compared(document, "plugin", other)
            cells = {f"{row['load']} ({name})": found for row in rows for name, found in row["ratios"].items()}
            lines.append(_behind(other, cells))
    return "\n".join([*parts, *(f"- {note}" for note in lines), ""])


def starts(results: Path) -> str:
    """How long the arms of all results at vLLM's defaults take to start; first those of engines alone."""
    paths = (*files(results, "starts-*.json"), *files(results, "defaults-*.json"))
    found = {path.stem: read_result(path) for path in paths}
    found |= {path.stem: read_served(path) for path in served_files(results)}
    return starts_grid(found).markdown()


def in_words_of(words: Sequence[str], results: Path) -> str:
    """A figure in a sentence; the module says what WORDS there are.

    Raises:
        LookupError: no result has it.
        TypeError: there are too few words, or too many.
    """
    kind, *rest = words
    return _FIGURES[kind](results, *rest)


def _control(results: Path, backend: str) -> str:
    """Each result counts once: its engines keep what their starts gave them, however many turns they have."""
    values = []
    for path in (*files(results, "defaults-*.json"), *files(results, "v1-*.json")):
        document = read_result(path)
        plan = document["plan"]
        rows = [row for row in document["summary"] if row["arm"] == plan["control"] and row["steady"]]
        own = [row["ratio"]["value"] for row in rows if "ratio" in row]
        if own and _backend(plan) == backend:
            values.append(statistics.geometric_mean(own))
    found = paired_ratio([1.0] * len(values), values)
    if found is None:
        raise LookupError("there are fewer than two such results")
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f}, {len(values)} pairs of engines)"


def _ratios(results: Path, name: str, arm: str, load: str) -> str:
    values = [
        row["ratio"]["value"]
        for path in files(results, f"{name}.json")
        for row in read_result(path)["summary"]
        if row["arm"] == arm and fnmatchcase(row["load"], load) and "ratio" in row
    ]
    if not values:
        raise LookupError("there is no such ratio")
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _tpot(results: Path, name: str, arm: str, load: str, share: str) -> str:
    rows = [row for row in summarise(_one(results, name)) if (row["arm"], row["load"]) == (arm, load)]
    return f"{rows[0]['tpot'][share]['median']:.1f}"


def _shorter(results: Path, latency: str, share: str) -> str:
    """Arms are compared by load, and on one machine only."""
    pairs = []
    for document in map(read_served, served_files(results)):
        plan, rows = document["plan"], summarise(document)
        found = {(row["arm"], row["machine"], row["load"]): row[latency][share]["median"] for row in rows}
        for (arm, *place), median in found.items():
            reference = found.get((plan["reference"], *place))
            if arm == Plugin.ON.value and reference is not None:
                pairs.append(median < reference)
    if not pairs:
        raise LookupError("no served result has the plugin and its reference")
    return f"{sum(pairs)} of {len(pairs)}"


def _tokens(results: Path, name: str, arm: str) -> str:
    different = compared = 0
    for path in files(results, f"{name}.json"):
        document = _one(results, path.stem)
        found = unlike(document, arm)
        different += sum(found.values())
        compared += sum(document["tokens"][arm][kind]["requests"] for kind in found)
    if not compared:
        raise LookupError("there is no such comparison")
    return f"{different} of {compared:,}"


_FIGURES: dict[str, Callable[..., str]] = {
    "control": _control,
    "ratios": _ratios,
    "shorter": _shorter,
    "tokens": _tokens,
    "tpot": _tpot,
}


def _one(results: Path, name: str) -> dict[str, Any]:
    found = find_served(results / f"{name}.json")
    if found is None:
        raise LookupError(f"{name} is no result of a served plan")
    return found
