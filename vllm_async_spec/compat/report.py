"""What a run of the suite found, of all builders: as JSON, as Markdown, and as JUnit's XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.published import SCHEMA, Run
from vllm_async_spec.compat.results import BackendResult, CaseResult

__all__ = ["Report", "junit", "markdown"]


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
        absent: Builders that are not of this release, or not for this machine, and why in a few words.
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
    def published(self) -> Run:
        """What of it is published."""
        return Run.read(self.to_dict())

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
            "absent": dict(self.absent),
            "backends": [result.to_dict() for result in self.results],
        }


def markdown(run: Run) -> str:
    """The run as a Markdown page: the table, and below it for each builder the faults and what was not run."""
    vllm = "without vLLM" if run.vllm is None else f"vLLM {run.vllm}"
    way = "stock" if run.plugin is None else "with the plugin"
    where = "a simulated device" if run.device == "cpu" else run.device
    lines = [
        f"# {vllm}, {way}" + ("" if run.device == "cpu" else f", {run.device}"),
        "",
        f"vllm-async-spec {run.version}, PyTorch {run.torch}, {where}, {run.date}. {run.summary}.",
        "",
        "```bash",
        run.command,
        "```",
    ]
    if run.plugin is not None:
        lines += ["", f"Patches applied: {', '.join(run.plugin) or 'none'}."]
    columns = ("backend", "needs of the host", "batches run", "waits or fails at", "waits in forward", "attention")
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in run.rows:
        at = "<br>".join(f"`{site}`" for site in row.sites)
        link = f"[{row.backend}](#{row.backend.lower()})" if row.evidence else row.backend
        ran = f"{row.ran} of {row.batches}"
        lines.append(f"| {link} | {row.cell} | {ran} | {at} | {row.forward_waits} | {row.attention} |")
    lines += [f"| {name} | {why} | - |  | - | - |" for name, why in run.absent.items()]
    for row in run.rows:
        if row.evidence:
            told = [f"- {line} ({'; '.join(cases)})" if cases else f"- {line}" for line, cases in row.evidence]
            lines += ["", f"## {row.backend}", "", *told]
    return "\n".join(lines) + "\n"


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
