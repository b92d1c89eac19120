"""Makes tables and figures of the documents from benchmarks/results, so that no measured number is typed by hand.

The site's build (docs/generated.py) puts a table in the place of `<!-- table: NAME -->`. NAME is a key of
`_MADE_OF_SEVERAL`, below, or the name of a plan's result file without `.json`. A sentence has a figure between two
comments in its line, `<!-- measured: WORDS -->` and `<!-- end of measured -->`; `published` has the WORDS.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import batching, generation, kernels, plan_time, step_time
from benchmarks.audit_tables import host_time_grid, ranks_grid
from benchmarks.features.table import feature_grid
from benchmarks.held import in_words
from benchmarks.present import Grid, grid, notes
from benchmarks.published import defaults, devices, in_words_of, runners, served, served_table, starts, variants
from benchmarks.results import RESULTS, read_result
from benchmarks.serving.results import find_served
from benchmarks.stored import exists, files, read_json
from benchmarks.waits.table import SHAPES, waits_tables

ROOT = Path(__file__).resolve().parents[1]

_FIGURE = re.compile(r"(?P<begin><!-- measured: (?P<words>.+?) -->).*?(?P<end><!-- end of measured -->)")


class TableError(ValueError):
    """A document names a table that can't be made; the message names both."""


def documents(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def rewrite(paths: Iterable[Path], results: Path = RESULTS) -> dict[Path, str]:
    """The new text of every document whose figures are stale.

    Raises:
        TableError: a document asks for a figure that no result has.
    """
    stale = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        new = _FIGURE.sub(partial(_figure, results=results, document=path), text)
        if new != text:
            stale[path] = new
    return stale


def _figure(place: re.Match[str], results: Path, document: Path) -> str:
    if place.start() == 0 or place.string[place.start() - 1] == "\n":
        raise TableError(f"{document} begins a line with {place['begin']}, which Markdown takes for HTML; move it")
    try:
        return f"{place['begin']}{in_words_of(place['words'].split(), results)}{place['end']}"
    except (LookupError, TypeError) as error:
        raise TableError(f"{document} asks for {place['words']!r}, which no result has: {error}") from None


def make_table(name: str, results: Path, document: Path) -> str:
    """The table of this name for `document`, as Markdown.

    Raises:
        TableError: there is no such result.
    """
    make = _MADE_OF_SEVERAL.get(name)
    if make is not None:
        return make(results)
    path = results / f"{name}.json"
    if not exists(path):
        raise TableError(f"{document} asks for the results {name!r}, and {path} does not exist")
    if (from_servers := find_served(path)) is not None:
        return served_table(from_servers, name)
    found = read_result(path)
    return "\n".join([grid(found).markdown(), *(f"{note}\n" for note in notes(found))])


def _host_time(results: Path) -> str:
    rows = []
    for found in _by_release(results, "host-time-h200-vllm-*.json"):
        operations = found["operations"].values()
        rows.append((found["vllm"], *(f"{it['stock_us']:.2f} → {it['grafted_us']:.2f}" for it in operations)))
    return Grid(("vLLM", "constructing the metadata", "`unpadded`, which constructs one"), rows).markdown()


def _generation(results: Path) -> str:
    # Some sizes are not measured, and some are measured with two releases of transformers.
    return _generated(path for size in generation.SIZES for path in files(results, f"generation-{size}-h200*.json"))


def _ungraphed(results: Path) -> str:
    return _generated([results / "generation-ungraphed-gpt2-h200.json"])


def _generated(paths: Iterable[Path]) -> str:
    found = [read_json(path) for path in paths]
    rows = [(each["model"], each["transformers"], *row) for each in found for row in generation.rows(each)]
    return Grid(("model", "transformers", *generation.COLUMNS), rows).markdown()


def _batching(results: Path) -> str:
    paths = [path for size in batching.MODELS[::-1] for path in files(results, f"batching-{size}*-h200.json")]
    found = [read_json(path) for path in paths]
    rows = [
        (each["model"], f"{each['new_tokens']:,}", "yes" if each.get("compiled") else "no", *row)
        for each in found
        for row in batching.rows(each, batching.REFERENCES)
    ]
    return Grid(("model", "new tokens", "compiled", *batching.columns(batching.REFERENCES)), rows).markdown()


def _held(results: Path) -> str:
    found = read_json(results / "held-h200.json")
    return Grid(("call", "host held, ms"), [(name, in_words(row)) for name, row in found["calls"].items()]).markdown()


def _kernels_of(path: Path) -> Any:
    """A result of `python -m benchmarks kernels`, with every second batch size."""
    found = read_json(path)
    return found | {"rows": [row for row in found["rows"] if row["requests"] in kernels.REQUESTS[::2]]}


def _kernels(results: Path) -> str:
    found = _kernels_of(results / "kernels-h200.json")
    return Grid(kernels.columns(found), list(kernels.rows(found))).markdown()


def _kernels_by_rows(results: Path) -> str:
    found = [_kernels_of(path) for path in files(results, "kernels-h200*.json")]
    found.sort(key=lambda each: each["tokens"] * each["group"])
    told = (f"{each['tokens']} tokens, groups of {each['group']}" for each in found)
    return Grid(("requests", "keys each", *told), list(kernels.by_rows(found))).markdown()


def _plan_time(results: Path) -> str:
    found = read_json(results / "plan-time-h200.json")
    return Grid(plan_time.columns(found), list(plan_time.rows(found))).markdown()


def _step_time(results: Path) -> str:
    found = read_json(results / "step-time-h200.json")
    rows = [(part, *step_time.in_words(kinds)) for part, kinds in found["parts"].items()]
    return Grid(("part", "stock, µs a step", "with the plugin"), rows).markdown()


def _soak(results: Path) -> str:
    rows = []
    for found in _by_release(results, "soak-*.json"):
        outcomes = found["outcomes"]
        rows.append(
            (
                found["vllm"],
                found["facts"]["runner"],
                found["soak"]["name"].split("-", 2)[2],
                devices(found["facts"], found["soak"]["subject"]["engine"]),
                f"{_compiled(found)}, {found['facts']['graphs']}",
                f"{found['plugin']}, broken: {found['control']}" if found["control"] else found["plugin"],
                f"{found['seconds']:.0f} s, {sum(found['delays'].values()):,}",
                f"{sum(outcomes.values()):,}, {found['tokens']:,}",
                f"{outcomes['same']:,}",
                f"{outcomes['swapped']:,} ({found['widest_swap']:.3f})",
                f"**{outcomes['different']:,}**",
                ", ".join(f"{reason} {count}" for reason, count in found["fallbacks"].items()) or "none",
            )
        )
    head = (
        "vLLM",
        "runner",
        "backend",
        "GPU",
        "compilation, graphs",
        "plugin",
        "time, delays",
        "requests, tokens",
        "as stock",
        "a near tie swapped (widest)",
        "different",
        "fallbacks",
    )
    return Grid(head, rows).markdown()


def _compiled(soak: dict[str, Any]) -> str:
    declared = soak["soak"]["subject"]["engine"].get("compilation_config", {})
    return f"mode {declared['mode']}" if "mode" in declared else str(soak["facts"]["compilation"]["mode"])


def _features(results: Path) -> str:
    return feature_grid(results).markdown()


_MADE_OF_SEVERAL: dict[str, Callable[[Path], str]] = {
    "batching": _batching,
    "defaults": defaults,
    "features": _features,
    "generation": _generation,
    "generation-ungraphed": _ungraphed,
    "held": _held,
    "host-time": _host_time,
    "host-time-by-phase": lambda results: host_time_grid(results).markdown(),
    "kernels": _kernels,
    "kernels-by-rows": _kernels_by_rows,
    "plan-time": _plan_time,
    "ranks": lambda results: ranks_grid(results).markdown(),
    "runners": runners,
    "served": served,
    "soak": _soak,
    "starts": starts,
    "step-time": _step_time,
    "variants": variants,
    **{f"feature-waits-{shape}": partial(waits_tables, shape=shape) for shape in SHAPES},
}


def _by_release(results: Path, pattern: str) -> list[dict[str, Any]]:
    """Results of that pattern, newest release first."""
    found: list[dict[str, Any]] = [read_json(path) for path in files(results, pattern)]
    return sorted(found, key=lambda each: [int(part) for part in each["vllm"].split(".")], reverse=True)
