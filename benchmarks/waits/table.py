"""The tables of the page: a row for each feature and engine, and what each engine was."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.present import Grid
from benchmarks.waits.cases import CASES, ENGINES, Case
from benchmarks.waits.result import GROUPS, REASONS, Found, published, ratio, step_ms

HEAD = (
    "feature",
    "vLLM",
    "ms a step (steps)",
    "step time, plain = 1",
    "host-caused idle",
    "critical waits a step",
    "lines that wait",
)
NOT_RUN = "not run"
SHAPES = tuple(dict.fromkeys(group.shape for group in GROUPS))


def waits_tables(results: Path, shape: str) -> str:
    """The table of one shape with the facts of its engines, as Markdown."""
    found = [each for each in published(results) if each["shape"] == shape]
    if not found:
        return f"The {shape} is not measured yet.\n"
    return "\n".join([waits_grid(found).markdown(), *(f"- {line}" for line in _facts(found)), ""])


def waits_grid(documents: Sequence[Mapping[str, Any]]) -> Grid:
    """A row for each case and result file, case by case."""
    return Grid(
        HEAD,
        [
            _row(case, document)
            for case in CASES.values()
            for document in documents
            if ENGINES[case.engine].shape(document["shape"]) is not None
        ],
    )


def _row(case: Case, document: Mapping[str, Any]) -> tuple[str, ...]:
    facts = document["engines"].get(case.engine, {})
    synchronous = facts.get("async_scheduling") is False
    engine = f"{document['release']} {document['runner']}" + (", synchronous" if synchronous else "")
    head = (f"`{case.name}`: {case.about}", engine)
    found = document["cases"].get(case.name)
    if found is None or not ("audit" in found or any(reason in found for reason in REASONS)):
        return (*head, NOT_RUN, "", "", "", "")
    for reason, form in zip(REASONS, ("vLLM refuses it: “{}”", "{}", "**failed**: {}"), strict=True):
        if reason in found:
            return (*head, form.format(found[reason].replace("|", r"\|")), "", "", "", "")
    return (*head, *_measured(found))


def _measured(found: Found) -> tuple[str, ...]:
    compared, audit = ratio(found), found["audit"]
    steps = sum(int(run[1]) for turn in found["turns"] for run in turn)
    speed = (
        f"{step_ms(found['turns']):.2f} ({steps:,})",
        "-" if compared is None else "{:.3f} ({:.3f}-{:.3f})".format(*compared),
    )
    if audit is None:
        return (*speed, "not audited", "not audited", "not audited")
    idle = audit["plain_idle"]
    waits, waiting_ms = audit["critical"]
    sites = "; ".join(f"`{site}` {kind} {per_step:.2f}" for site, kind, per_step in audit["sites"])
    return (
        *speed,
        "-" if idle is None else f"{idle:.0%}",
        f"**{waits:.2f}** ({waiting_ms:.2f} ms)" if waits else "0",
        sites or "none",
    )


def _facts(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each result's plain engine was, in a line."""
    for document in documents:
        facts = document["engines"].get("plain")
        if facts is None:
            continue
        scheduling = "asynchronous" if facts["async_scheduling"] else "synchronous"
        yield (
            f"vLLM {facts['vllm']} {facts['runner']}, PyTorch {facts['torch']}, {facts['hardware']['device']}: "
            f"{', '.join(facts['backends'])}, compilation mode {facts['compilation']}, CUDA graphs {facts['graphs']}, "
            f"{scheduling} scheduling, prefix caching {'on' if facts['prefix_caching'] else 'off'}."
        )
