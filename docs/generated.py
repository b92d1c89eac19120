"""Files of the site that MkDocs makes while it builds, from summaries in git; git does not have them.

- `compat/RUN.md`, `compat/RUN.json`, `assets/compatibility.html` and a badge, from `docs/compat/runs.json.xz`.
- `assets/results/RESULT.svg`, from the archive in `benchmarks/results`, for each figure that a page shows.
- `assets/audit-example.html`, from `docs/examples/audit.json.xz`.
- `waits.md` and its line in the navigation, from `docs/templates/waits.md`, once there are results named
  `feature-waits-*`.
- The table of a result, in the place of `<!-- table: NAME -->` in a page.
"""

import contextlib
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
_TABLE = re.compile(r"^<!-- table: (\S+) -->$", re.MULTILINE)

WAITS = "waits.md"
_WAITS_TITLE, _WAITS_AFTER = "What waits, by feature", "measured.md"


def on_config(config: Any) -> Any:
    """List the page of waits below the measurements, if there is one."""
    with _importing_benchmarks():
        if waits():
            list_after(config["nav"], _WAITS_AFTER, {_WAITS_TITLE: WAITS})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add what is made to what was found."""
    with _importing_benchmarks():
        for path, content in [*compatibility(), *figures(), audit_example(), *waits()]:
            files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put tables where a page asks for them."""
    with _importing_benchmarks():
        return with_tables(markdown, Path(page.file.src_path))


@contextlib.contextmanager
def _importing_benchmarks() -> Iterator[None]:
    sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))


def with_tables(markdown: str, page: Path, results: Path | None = None) -> str:
    """The text of `page` with the tables that it asks for; raises `TableError` for a result that is not there."""
    from benchmarks.results import RESULTS
    from benchmarks.tables import make_table

    return _TABLE.sub(lambda asked: make_table(asked[1], results or RESULTS, page), markdown)


def compatibility() -> Iterator[tuple[str, str]]:
    """Path and content of what is made of the compatibility suite's published runs."""
    from vllm_async_spec.compat.archive import read_archive
    from vllm_async_spec.compat.publish import documents

    yield from documents(read_archive(DOCS / "compat")).items()


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
    from vllm_async_spec.compat.json_text import unpacked

    found = json.loads(unpacked(DOCS / "examples" / "audit.json.xz"))
    page = render_html(Report.from_dict(found["report"]), before=Report.from_dict(found["before"]))
    return "assets/audit-example.html", page


def waits(results: Path | None = None) -> list[tuple[str, str]]:
    """Path and content of the page of waits; nothing if there is no result to show.

    Args:
        results: folder of the results; this repository's if None.
    """
    from benchmarks.results import RESULTS
    from benchmarks.waits.result import published

    folder, template = results or RESULTS, DOCS / "templates" / WAITS
    if not published(folder):
        return []
    return [(WAITS, with_tables(template.read_text(encoding="utf-8"), template, folder))]


def list_after(nav: list[Any], page: str, entry: dict[str, str]) -> None:
    """Put an entry of MkDocs' navigation behind that of a page, at the top or in a section.

    Raises:
        LookupError: the navigation lacks the page.
    """
    for section in [nav, *(inner for each in nav for inner in each.values() if isinstance(inner, list))]:
        for place, each in enumerate(section):
            if page in each.values():
                section.insert(place + 1, entry)
                return
    raise LookupError(f"the navigation of mkdocs.yml has no {page}, after which {entry} belongs")


def shown() -> set[str]:
    """Names of the results whose figures are on a page."""
    return {name for page in DOCS.glob("*.md") for name in _FIGURE.findall(page.read_text(encoding="utf-8"))}
