"""A served plan's result as a table and notes, for the terminal and for the documents alike."""

from itertools import compress

from benchmarks.facts import captions
from benchmarks.present import Grid
from benchmarks.serving.results import SPEEDS, Document, engines, machines, starts, summarise, unlike
from benchmarks.summary import Row, with_reference
from vllm_async_spec.audit.report import Phase

_LATENCIES = {"ttft": ("TTFT", 0), "tpot": ("TPOT", 2), "itl": ("ITL", 2)}
"""Headings, and digits after the point."""
_COMPARED = "tpot"
"""The latency whose p50 and p99 are compared, so that their spread is shown."""


def serve_grid(document: Document) -> Grid:
    """A row for each machine, load and arm: medians over passes, the spread of what is compared, ratios."""
    reference = document["plan"]["reference"]
    rows, several = summarise(document), len(machines(document)) > 1
    audited = any(row["host_idle"] is not None for row in rows)
    head = [
        *["machine"] * several,
        "load",
        "arm",
        *(f"{name}, ms: p50 / p90 / p99" for name, _ in _LATENCIES.values()),
        "goodput, requests/s",
        "tokens/s",
        "accepted",
        *["host-caused idle"] * audited,
        *(f"speed by {name}, {reference} = 1" for name in SPEEDS),
        "n",
    ]
    return Grid(head, [[*[str(row["machine"] + 1)] * several, *_row(row, audited=audited)] for row in rows])


def halves(whole: Grid) -> list[Grid]:
    """A table as two that fit on a page: its latencies, and all else."""
    both = {"machine", "load", "arm", "n"}
    latencies = [name in both or ", ms" in name for name in whole.head]
    others = [name in both or not latency for name, latency in zip(whole.head, latencies, strict=True)]
    return [
        Grid([*compress(whole.head, chosen)], [[*compress(row, chosen)] for row in whole.rows])
        for chosen in (latencies, others)
    ]


def compared(document: Document, arm: str, other: str) -> list[Row]:
    """An arm's rows, compared with `other`; a ratio that noise forbids to the plan's reference has no value either.

    Raises:
        PlanError: the document has no arm `other`.
    """
    own = {(row["machine"], row["load"]): row["ratios"] for row in summarise(document) if row["arm"] == arm}
    rows = [row for row in summarise(with_reference(document, other)) if row["arm"] == arm]
    for row in rows:
        forbidden = own.get((row["machine"], row["load"]), {})
        row["ratios"] |= {name: found for name, found in forbidden.items() if "refused" in found}
    return rows


def against_grid(document: Document, arm: str, other: str) -> Grid:
    """Speeds of one arm, another being 1, by machine and load. Raises what `compared` raises."""
    several = len(machines(document)) > 1
    head = [*["machine"] * several, "load", *(f"{arm} by {name}, {other} = 1" for name in SPEEDS), "n"]
    rows = [
        [
            *[str(row["machine"] + 1)] * several,
            row["load"],
            *(_ratio(row["ratios"].get(name)) for name in SPEEDS),
            str(row["n"]),
        ]
        for row in compared(document, arm, other)
    ]
    return Grid(head, rows)


def serve_notes(document: Document) -> list[str]:
    """Notes: why ratios are omitted, tokens, agreements, audits, starts, engines, the goodput's limits, failures."""
    plan = document["plan"]
    lines = _refusals(document)
    if document["tokens"]:
        lines += _tokens(document)
    lines += [*_agreements(document), *_audits_elsewhere(document)]
    if len(names := [*machines(document)]) > 1:
        lines += [f"Machine {number}: {name}." for number, name in enumerate(names, 1)]
    lines += [_start(arm, found[-1]) for arm in _arms(plan) if (found := _starts(document, arm))]
    lines += captions(engines(document))
    if plan["goodput"]:
        limits = " and ".join(f"{name.upper()} up to {limit:g} ms" for name, limit in plan["goodput"].items())
        lines.append(f"Goodput counts requests with {limits}.")
    return lines + [
        f"{failure['arm']}, {failure['load'] or 'tokens'}: {failure['error']}" for failure in document["failures"]
    ]


def _arms(plan: Row) -> list[str]:
    return [arm["name"] for arm in plan["arms"]]


def _starts(document: Document, arm: str) -> list[Row]:
    return [start for start in starts(document) if start["arm"] == arm]


def _row(row: Row, *, audited: bool) -> list[str]:
    latencies = (
        " / ".join(
            _latency(found, digits, spread=key == _COMPARED and share != "p90") for share, found in row[key].items()
        )
        for key, (_, digits) in _LATENCIES.items()
    )
    return [
        row["load"],
        row["arm"],
        *latencies,
        f"{row['request_goodput']['median']:.1f}" if row["request_goodput"] else "-",
        _spread(row["output_throughput"], 0),
        f"{row['acceptance_length']['median']:.2f}" if row["acceptance_length"] else "-",
        *["-" if row["host_idle"] is None else f"{row['host_idle']:.0%}"] * audited,
        *(_ratio(row["ratios"].get(name)) for name in SPEEDS),
        str(row["n"]),
    ]


def _latency(found: Row, digits: int, *, spread: bool) -> str:
    return _spread(found, digits) if spread else f"{found['median']:,.{digits}f}"


def _spread(found: Row, digits: int) -> str:
    return "{:,.{digits}f} ({:,.{digits}f}-{:,.{digits}f})".format(*found.values(), digits=digits)


def _ratio(found: Row | None) -> str:
    if found is None or "refused" in found:
        return "-"
    return f"{found['value']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def _refusals(document: Document) -> list[str]:
    found: dict[str, dict[str, list[str]]] = {}
    for row in summarise(document):
        for name, ratio in row["ratios"].items():
            if "refused" in ratio:
                names = found.setdefault(ratio["refused"], {}).setdefault(row["load"], [])
                names += [name] * (name not in names)
    return [
        f"Ratios omitted for {', '.join(_of_load(load, names) for load, names in places.items())}: {why}."
        for why, places in found.items()
    ]


def _of_load(load: str, names: list[str]) -> str:
    return load if len(names) == len(SPEEDS) else f"{load} ({', '.join(names)})"


def _tokens(document: Document) -> list[str]:
    plan, tokens = document["plan"], document["tokens"]
    told = [
        f"{arm} " + " and ".join(f"{count} of {samples[kind]['requests']} {kind}" for kind, count in counts.items())
        for arm, samples in tokens.items()
        if (counts := unlike(document, arm))
    ]
    lines = [f"Requests whose tokens differ from {plan['reference']}'s: {'; '.join(told) or 'none compared yet'}."]
    if plan["reference"] in tokens:
        drawn = tokens[plan["reference"]]["seeded"]
        lines.append(f"Sampling drew other tokens than the likeliest in {drawn['unlike_greedy']} seeded requests.")
    control = unlike(document, plan["control"]) if plan["control"] in tokens else {}
    noisy = [kind for kind, count in control.items() if count]
    if noisy:
        lines.append(f"{plan['control']} shows that vLLM does not repeat its own {' and '.join(noisy)} tokens here.")
    return lines


def _agreements(document: Document) -> list[str]:
    """What data parallelism costs the engine that was audited."""
    lines = []
    for audit in document.get("audits", ()):
        ms, idle = audit.get("phases", {}).get(Phase.AGREEMENT.value), audit["plain_idle"]
        if ms and audit["step_ms"]:
            share = "" if idle is None else f", of which the GPU is idle for {idle:.0%}"
            lines.append(
                f"{audit['arm']}, {audit['load']}: a step agrees with the other engines for {ms:.2f} ms, and takes "
                f"{audit['step_ms']:.2f} ms where nothing is recorded{share}."
            )
    return lines


def _audits_elsewhere(document: Document) -> list[str]:
    """Audits on a machine that has no row of their load and arm."""
    rows = {(row["machine"], row["load"], row["arm"]) for row in summarise(document)}
    numbers = {session: number for number, own in enumerate(machines(document).values()) for session in own}
    return [
        f"{audit['arm']}, {audit['load']}: host-caused idle {audit['plain_idle']:.0%}, audited on machine {number + 1}."
        for audit in document.get("audits", ())
        if audit["plain_idle"] is not None
        and ((number := numbers[audit["session"]]), audit["load"], audit["arm"]) not in rows
    ]


def _start(arm: str, start: Row) -> str:
    others = start["beside"] - 1
    beside = f"with {others} other{'s' * (others > 1)}" if others else "alone"
    kept = {"cold": "cold caches", "shared": "caches that another arm had warmed", "warm": "warm caches"}
    return f"{arm}: ready {start['seconds']:.0f} s after its start, {beside}, with {kept[start['caches']]}."
