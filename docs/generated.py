"""Files of the site that MkDocs makes while it builds, from summaries in git; git does not have them.

- `compat/RUN.md`, `assets/compatibility.html` and a badge, from `docs/compat/RUN.json`.
- `assets/results/RESULT.svg`, from `benchmarks/results/RESULT.json`, for each figure that a page shows.
- `assets/audit-example.html`, from `docs/examples/audit.json`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

_FIGURE = re.compile(r"\(assets/results/([\w.-]+)\.svg\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add what is made to what was found."""
    sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed
    try:
        for path, content in [*compatibility(), *figures(), audit_example()]:
            files.append(File.generated(config, path, content=content))
    finally:
        sys.path.remove(str(ROOT))
    return files


def compatibility() -> Iterator[tuple[str, str]]:
    """Path and content of what is made of the compatibility suite's published runs."""
    from vllm_async_spec.compat.publish import documents
    from vllm_async_spec.compat.report import read_runs

    yield from documents(read_runs((DOCS / "compat").glob("*.json"))).items()


def figures() -> Iterator[tuple[str, bytes]]:
    """Path and content of the figures that pages show."""
    from benchmarks.plot import draw
    from benchmarks.results import RESULTS, read_result, read_trace
    from benchmarks.serving.results import find_served

    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(shown()):
            source, figure = RESULTS / f"{name}.json", Path(folder) / f"{name}.svg"
            draw(read_trace(source) or find_served(source) or read_result(source), figure)
            yield f"assets/results/{name}.svg", figure.read_bytes()


def audit_example() -> tuple[str, str]:
    """Path and content of the page of the audit that docs/audit.md shows."""
    from vllm_async_spec.audit.html import render_html
    from vllm_async_spec.audit.report import Report

    found = json.loads((DOCS / "examples" / "audit.json").read_text(encoding="utf-8"))
    page = render_html(Report.from_dict(found["report"]), before=Report.from_dict(found["before"]))
    return "assets/audit-example.html", page


def shown() -> set[str]:
    """Names of the results whose figures are on a page."""
    return {name for page in DOCS.glob("*.md") for name in _FIGURE.findall(page.read_text(encoding="utf-8"))}
