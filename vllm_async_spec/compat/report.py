"""A run of the suite: with all evidence, and as it is published.

`Report` is what `vllm-async-spec compat --json` writes. `Run` keeps each builder's verdict and its evidence in a few
kilobytes; `Run.read` takes the JSON of either. Tables, pages and badges are made from a `Run`, so that none of them
says more than the data does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_async_spec.compat.advice import advised
from vllm_async_spec.compat.batch_names import Grouped, grouped_batches
from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.json_text import compact_json
from vllm_async_spec.compat.results import NOT_SHOWN_CLEAN, BackendResult

SCHEMA = 1
"""Schema of both kinds of files. Increase it whenever a reader of older files would misunderstand a newer one."""

CLASSES = ("none", "prefill rows", "upper bound", "exact", "blocks", "fails", "not run", "not constructed")
"""The verdicts, better ones first."""

NOT_RUN = "not run"
"""The verdict or result of anything that did not run."""

_SHOWN_SITES = 3
_WAITS = re.compile(r" it waits: .+ at (\S+)(?: < \S+)?$")
_FAILS = re.compile(r" (?:it|its forward) fails: .+ at (\S+)$")


class PublishedError(ValueError):
    """A file is no result of the suite; the message is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is published of one builder's `BackendResult`.

    Attributes:
        verdict: One of `CLASSES`.
        ran: Number of batches that were built.
        batches: Number of all batches.
        limits: Limits of the verdict, such as `kernels not validated`.
        faults: Faults in a step, a sentence each, with the batches that have them.
        at_capture: The same while a CUDA graph is recorded.
        not_run: Why batches did not run, and which.
        notes: Findings that are no fault in an engine with asynchronous speculative decoding, but may be elsewhere.
        attention: `right`, or `wrong` and how far off, with the number of batches; or `not run` and why.
        forward_waits: Number of places that wait in the layer's forward, or `none`; or `not run`.
        not_attended: Why some batches ran without attention, and which.
        unpadded: The declaration by which batches were given without padding rows, and which.
        branches: How many branches the batches reached, such as `31 of 44`; empty if an older suite made the file.
        unreached: Lines that could wait and that no batch reached, a sentence each.
        models: The models whose numbers the builder was tried with; empty if it asks for none. A batch of some of them
            only has their names behind its own.
    """

    backend: str
    builder: str
    verdict: str
    passed: bool
    ran: int
    batches: int
    limits: list[str] = field(default_factory=list)
    faults: Grouped = field(default_factory=dict)
    at_capture: Grouped = field(default_factory=dict)
    not_run: Grouped = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    not_validated: list[str] = field(default_factory=list)
    failure: str | None = None
    attention: str = NOT_RUN
    forward_waits: str = NOT_RUN
    not_attended: Grouped = field(default_factory=dict)
    unpadded: Grouped = field(default_factory=dict)
    unfinished: str | None = None
    branches: str = ""
    unreached: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    @property
    def cell(self) -> str:
        """The verdict and what limits it, in a few words."""
        return ", ".join([self.verdict, *self.limits])

    @property
    def sites(self) -> list[str]:
        """`file:line` where the builder waits or fails in a step; the first few."""
        found = [match[1] for pattern in (_WAITS, _FAILS) for fault in self.faults if (match := pattern.search(fault))]
        return list(dict.fromkeys(found))[:_SHOWN_SITES]

    @property
    def evidence(self) -> list[tuple[str, list[str]]]:
        """The evidence for the verdict: sentences, each with the batches concerned, if any."""
        found: list[tuple[str, list[str]]] = [] if self.failure is None else [(self.failure, [])]
        found += [(advised(fault), cases) for fault, cases in self.faults.items()]
        found += [(f"at capture, {advised(fault)}", cases) for fault, cases in self.at_capture.items()]
        found += [] if self.unfinished is None else [(self.unfinished, [])]
        found += [(f"no batch reached {line}", []) for line in self.unreached]
        found += [(f"not run: {reason}", cases) for reason, cases in self.not_run.items()]
        found += [(f"without padding rows: {reason}", cases) for reason, cases in self.unpadded.items()]
        found += [(note, []) for note in self.notes]
        if self.not_validated:
            found.append((f"not validated, because no kernel ran: {', '.join(self.not_validated)}", []))
        found += [(f"attention not run: {reason}", cases) for reason, cases in self.not_attended.items()]
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """One run: all builders of one release, stock or with the plugin, on one device.

    Attributes:
        version: Of vllm-async-spec.
        vllm: The release; None where no vLLM was imported.
        torch: PyTorch's version.
        device: `cpu`, where device memory is simulated, or the GPU's name.
        plugin: The patches that were applied; None for stock vLLM.
        date: When, as YYYY-MM-DD.
        summary: The run in one line.
        rows: One for each builder.
        absent: Builders that this release lacks or that need another machine, each with a short reason.
    """

    version: str
    vllm: str | None
    torch: str
    device: str
    plugin: list[str] | None
    date: str
    command: str
    summary: str
    rows: list[Row]
    absent: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def way(self) -> str:
        """`stock` or `plugin`."""
        return "stock" if self.plugin is None else "plugin"

    @property
    def machine(self) -> str:
        """`cpu`, or the last word of the GPU's name, such as `h200`."""
        return self.device.split()[-1].lower()

    @property
    def name(self) -> str:
        """What its files are called: `0.32.0-stock`, and on a GPU `0.32.0-stock-h200`."""
        return "-".join([self.vllm or "none", self.way, *([] if self.machine == "cpu" else [self.machine])])

    @property
    def order(self) -> tuple[list[int], bool, bool, str]:
        """What runs are sorted by: release, then stock first, then the simulated device first."""
        numbers = [int(part) for part in re.findall(r"\d+", (self.vllm or "0").partition("+")[0])]
        return numbers, self.way != "stock", self.machine != "cpu", self.machine

    @property
    def line(self) -> str:
        """The text of a badge."""
        if len(self.rows) == 1:
            return f"async-spec: {self.rows[0].cell}"
        unsure = sum(NOT_SHOWN_CLEAN in row.limits for row in self.rows)
        clean = sum(row.passed for row in self.rows) - unsure
        tail = f", {unsure} {NOT_SHOWN_CLEAN}" if unsure else ""
        return f"async-spec: {clean} of {len(self.rows)} builders build from device seq_lens{tail}"

    def to_json(self) -> str:
        """The JSON text that is committed; a row leaves out what is empty."""
        rows = [
            {name: value for name, value in asdict(row).items() if value not in ([], {}, None, "")} for row in self.rows
        ]
        return compact_json(asdict(self) | {"rows": rows})

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Run:
        """Make a run from plain data: a full result of `compat --json`, or a published one.

        Raises:
            PublishedError: The data is neither.
        """
        if data.get("schema") != SCHEMA or not ("rows" in data or "backends" in data):
            raise PublishedError(
                f"the file holds no result with schema {SCHEMA}; run `vllm-async-spec compat --json` to make one"
            )
        data = dict(data) | {"command": command_line(data["command"].split())}
        if "rows" in data:
            return cls(**dict(data) | {"rows": [Row(**row) for row in data["rows"]]})
        patches = data["plugin"]
        applied = None if patches is None else [name for name, state in patches.items() if state == "applied"]
        kept = ("version", "vllm", "torch", "device", "date", "command", "summary")
        rows = [_row(backend) for backend in data["backends"]]
        return cls(**{name: data[name] for name in kept}, plugin=applied, rows=rows, absent=data.get("absent", {}))


@dataclass(frozen=True, slots=True)
class Report:
    """One run with all evidence; other attributes are those of `Run`.

    Attributes:
        release: Of vLLM; None where none was imported.
        patches: State of each of the plugin's patches; None for stock vLLM.
        stubs: Stubs used for parts of vLLM or of its machine, each with the reason.
        results: One for each builder.
        not_tried: Builders that were not tried to the end when the run was stopped; none of a finished run.
    """

    version: str
    release: str | None
    torch: str
    device: str
    patches: Mapping[str, str] | None
    date: str
    command: str
    stubs: tuple[tuple[str, str], ...]
    results: tuple[BackendResult, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    not_tried: tuple[str, ...] = ()

    @property
    def patched(self) -> bool:
        """Whether the plugin was loaded."""
        return self.patches is not None

    @property
    def exit_code(self) -> int:
        """0: no builder waits in a step; 1: one waits, fails, or builds something wrong; 2: one can't be tried."""
        if self.not_tried or any(result.untried for result in self.results):
            return 2
        return 0 if all(result.passed for result in self.results) else 1

    @property
    def published(self) -> Run:
        """The part that is published."""
        return Run.read(self.to_dict())

    @property
    def summary(self) -> str:
        """The run in one line."""
        clean = sum(result.shown_clean for result in self.results)
        counts = {
            NOT_SHOWN_CLEAN: sum(result.passed for result in self.results) - clean,
            "fail": sum(bool(result.failed) for result in self.results),
            "could not be tried": sum(result.untried for result in self.results),
            "not tried, because the run was stopped": len(self.not_tried),
        }
        tail = "".join(f", {count} {what}" for what, count in counts.items() if count)
        return f"{clean} of {len(self.results)} builders run without a wait{tail}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON; all evidence is in it."""
        return {
            "schema": SCHEMA,
            "version": self.version,
            "vllm": self.release,
            "torch": self.torch,
            "device": self.device,
            "plugin": None if self.patches is None else dict(self.patches),
            "date": self.date,
            "command": self.command,
            "summary": self.summary,
            "stubs": [{"name": name, "why": why} for name, why in self.stubs],
            "absent": dict(self.absent),
            "not_tried": list(self.not_tried),
            "backends": [result.to_dict() for result in self.results],
        }


def command_line(words: Sequence[str]) -> str:
    """The command with the program's own name and without the directories of the machine that ran it."""
    program, *arguments = words
    name = Path(program).name
    named = [option + sign + _relative(value) for option, sign, value in (each.rpartition("=") for each in arguments)]
    return " ".join(["vllm-async-spec" if name == "-c" else name, *named])


def _relative(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these files, sorted by release, then stock first, then the simulated device first.

    Raises:
        PublishedError: A file can't be read or holds no run.
    """
    runs = []
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and data.get("not_tried"):
                raise ValueError(f"the run was stopped in {data['not_tried'][0]}; run the suite again to the end")
            runs.append(Run.read(data if isinstance(data, dict) else {}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PublishedError(f"{path} can't be read: {error}") from error
    return sorted(runs, key=lambda run: run.order)


def _row(backend: Mapping[str, Any]) -> Row:
    ran = [case for case in backend["cases"] if case["need"] is not None]
    steps = [case for case in ran if not case["capture"]]
    # A batch that raises is a fault at capture too: the server does not start.
    failed = [case for case in backend["cases"] if case.get("failed")]
    faulty = [case for case in backend["cases"] if case in steps or case in failed]
    grouped = functools.partial(grouped_batches, batches=backend["cases"])
    realistic = [build for case in steps for build in case["builds"] if build["realistic"]]
    wrong = [build for build in realistic if any(each["judgement"] == "wrong" for each in build["differences"])]
    attended = [each for case in steps for each in case.get("attended", ()) if each["realistic"]]
    reached = backend.get("reached") or {"branches": "", "unreached": []}
    limits = {
        NOT_SHOWN_CLEAN: backend["passed"] and not backend.get("shown_clean", True),
        "wrong with slack": any(not build.get("updated") for build in wrong),
        "wrong after updates": any(build.get("updated") for build in wrong),
        "changes the batch": any(build["changed"] for build in realistic),
        "kernels not validated": bool(backend["not_validated"]),
        "attention wrong": any(each["right"] is False for each in attended),
        "waits in forward": any(each["waits"] for each in attended),
        "wrong fields": any(case.get("against_model") for case in steps),
        "keeps other batches": any(case.get("wrong_in_turn") for case in steps),
    }
    return Row(
        backend=backend["backend"],
        builder=backend["builder"],
        verdict=backend["verdict"],
        limits=[limit for limit, holds in limits.items() if holds and steps],
        passed=backend["passed"],
        ran=len(ran),
        batches=len(backend["cases"]),
        faults=grouped((fault, case) for case in faulty for fault in case["faults"]),
        at_capture=grouped(
            (fault, case) for case in ran if case["capture"] and case not in failed for fault in case["faults"]
        ),
        not_run=grouped((case["not_run"], case) for case in backend["cases"] if case["not_run"] is not None),
        unpadded=grouped((case["unpadded"], case) for case in backend["cases"] if case.get("unpadded")),
        unfinished=backend.get("unfinished"),
        notes=sorted({note for case in steps for note in case["notes"]}),
        not_validated=backend["not_validated"],
        failure=backend["failure"],
        branches=reached["branches"],
        unreached=reached["unreached"],
        models=backend.get("models", []),
        **_forward(backend, steps),
    )


def _forward(backend: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The published fields about attention; results from before the suite ran attention count as not run."""
    reason = backend.get("not_attended", "made by an older suite, which ran no attention")
    if reason is not None:
        return {"attention": f"{NOT_RUN}: {reason}"}
    # A layer attends with the numbers of one model only.
    tried = {case.get("model") for case in steps if case["attended"]}
    steps = [case for case in steps if case.get("model") in tried]
    each = [(case["case"], attended) for case in steps for attended in case["attended"]]
    ran = [(case, attended) for case, attended in each if attended["difference"] is not None]
    batches = {case for case, attended in ran if attended["realistic"]}
    # Attention with other host lengths only helped to find the class of need, which is published separately.
    told = [attended for _, attended in ran if attended["realistic"] or attended["host"] == Host.EXACT.value]
    wrong = [attended for attended in told if not attended["right"]]
    # Show what an engine knows before what it can't know.
    worst = max(wrong, key=lambda a: (a["realistic"], float(a["difference"])), default=None)
    said = "right" if worst is None else f"wrong by {float(worst['difference']):.2g} told {worst['host']}"
    sites = {tuple(wait["stack"][:2]) or wait["what"] for _, attended in ran for wait in attended["waits"]}
    failing = {case["case"] for case in steps if case.get("failed") and case["attended"]}
    fails = f", fails with {len(failing)}" if failing else ""
    return {
        "attention": f"{said}, {len(batches)} of {len(steps)} batches{fails}",
        "forward_waits": f"{len(sites)} {'place' if len(sites) == 1 else 'places'}" if sites else "none",
        "not_attended": grouped_batches(
            ((a["not_run"], case) for case in steps for a in case["attended"] if a["not_run"] is not None), steps
        ),
    }
