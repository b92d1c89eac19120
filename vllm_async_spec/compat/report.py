"""What a run of the suite found, of all builders: as JSON, as Markdown, and as JUnit's XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.results import BackendResult, CaseResult

__all__ = ["SCHEMA", "Report", "cell", "junit", "markdown"]

SCHEMA = 1
"""Raised by one whenever a reader of older files would misunderstand a newer one."""

_SHOWN_SITES = 3


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        version: Of vllm-async-spec.
        release: Of vLLM; None where none was imported.
        torch: PyTorch's version.
        device: `cpu`, where device memory is simulated, or the GPU's name.
        patches: What has become of each of the plugin's patches; None for stock vLLM.
        date: When, as YYYY-MM-DD.
        command: The command line.
        stubs: What stood in for parts of vLLM or of its machine, and what fails without it.
        results: One for each builder.
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

    @property
    def patched(self) -> bool:
        """Whether the plugin was loaded."""
        return self.patches is not None

    @property
    def exit_code(self) -> int:
        """0: no builder waits in a step; 1: one does, or builds something wrong; 2: one could not be tried."""
        if any(not result.steps for result in self.results):
            return 2
        return 0 if all(result.passed for result in self.results) else 1

    @property
    def summary(self) -> str:
        """The run in one line."""
        clean = sum(result.passed for result in self.results)
        untried = sum(not result.steps for result in self.results)
        tail = f", {untried} could not be tried" if untried else ""
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
            "backends": [result.to_dict() for result in self.results],
        }


def cell(result: BackendResult) -> str:
    """The verdict and what limits it, in a few words."""
    if not result.steps:
        return result.verdict
    parts = [result.verdict]
    realistic = [case.build(case.realistic) for case in result.steps]
    if any(build is not None and build.wrong for build in realistic):
        parts.append("wrong with slack")
    if any(build is not None and build.changed for build in realistic):
        parts.append("changes the batch")
    if result.not_validated:
        parts.append("kernels not validated")
    return ", ".join(parts)


def sites(result: BackendResult) -> tuple[str, ...]:
    """Where it waits or fails in a step, each line once; the first few."""
    builds = [build for case in result.steps if (build := case.build(case.realistic)) is not None]
    found = [wait.site.partition(" < ")[0] for wait in result.waits]
    found += [build.failure.rpartition(" at ")[2] for build in builds if build.failure is not None]
    return tuple(dict.fromkeys(found))[:_SHOWN_SITES]


def batches(result: BackendResult) -> str:
    """How many of the batches ran."""
    return f"{len(result.ran)} of {len(result.cases)}"


def markdown(report: Report) -> str:
    """The run as a Markdown page: the table, and below it for each builder the faults and what was not run."""
    vllm = "without vLLM" if report.release is None else f"vLLM {report.release}"
    with_plugin = "with the plugin" if report.patched else "stock"
    lines = [
        f"# {vllm}, {with_plugin}",
        "",
        f"vllm-async-spec {report.version}, PyTorch {report.torch}, {_where(report)}, {report.date}. {report.summary}.",
        "",
        "```bash",
        report.command,
        "```",
    ]
    if report.patches is not None:
        applied = [name for name, state in report.patches.items() if state == "applied"]
        lines += ["", f"Patches applied: {', '.join(applied) or 'none'}."]
    lines += ["", "| backend | needs of the host | batches run | waits or fails at |", "|---|---|---|---|"]
    for result in report.results:
        at = "<br>".join(f"`{site}`" for site in sites(result))
        link = f"[{result.backend}](#{result.backend.lower()})" if _details(result) else result.backend
        lines.append(f"| {link} | {cell(result)} | {batches(result)} | {at} |")
    for result in report.results:
        if detail := _details(result):
            lines += ["", f"## {result.backend}", "", *(f"- {line}" for line in detail)]
    return "\n".join(lines) + "\n"


def _where(report: Report) -> str:
    return "a simulated device" if report.device == "cpu" else report.device


def _details(result: BackendResult) -> list[str]:
    by_fault: dict[str, list[str]] = {}
    for case, faults in result.faults.items():
        for fault in faults:
            by_fault.setdefault(fault, []).append(case)
    lines = [] if result.failure is None else [result.failure]
    lines += [f"{'; '.join(cases)}: {fault}" for fault, cases in by_fault.items()]
    lines += [f"at capture, {case}: {fault}" for case, faults in result.at_capture.items() for fault in faults]
    not_run: dict[str, list[str]] = {}
    for case_result in result.cases:
        if case_result.not_run is not None:
            not_run.setdefault(case_result.not_run, []).append(case_result.case)
    lines += [f"not run, {'; '.join(cases)}: {reason}" for reason, cases in not_run.items()]
    lines += sorted({note for case_result in result.steps for note in case_result.notes})
    if result.not_validated:
        lines.append(f"not validated, because no kernel ran: {', '.join(result.not_validated)}")
    return lines


def junit(report: Report) -> str:
    """The run for a CI system: a suite for each builder, a test for each batch."""
    root = ET.Element("testsuites", name=f"vllm-async-spec compat {report.version}")
    for result in report.results:
        suite = ET.SubElement(root, "testsuite", name=result.backend)
        cases = result.cases or (CaseResult("construction", None, Host.EXACT),)
        counts = {"tests": len(cases), "failures": 0, "skipped": 0, "errors": 0}
        for case in cases:
            test = ET.SubElement(suite, "testcase", classname=result.backend, name=case.case)
            faults = () if case.capture else case.faults
            if result.failure is not None:
                counts["errors"] += 1
                ET.SubElement(test, "error", message=result.failure)
            elif case.not_run is not None:
                counts["skipped"] += 1
                ET.SubElement(test, "skipped", message=case.not_run)
            elif faults:
                counts["failures"] += 1
                ET.SubElement(test, "failure", message=faults[0]).text = "\n".join(faults)
        for name, count in counts.items():
            suite.set(name, str(count))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
