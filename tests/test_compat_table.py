"""The table of vLLM's builders, which the site makes from the pages of the suite's runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from vllm_async_spec.compat.backends import BACKENDS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "compat").glob("*.md"))


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    made = hooks.on_page_markdown("<!-- compat: table -->")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines()]


def test_each_run_is_a_column_and_each_backend_a_row(table: list[list[str]]):
    assert len(table[0]) == len(PAGES) + 1 == len(table[1])
    assert {row[0] for row in table[2:]} <= BACKENDS.keys()
    rows = re.findall(r"^\| \[?[A-Z]", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)
    assert len(rows) == sum(cell != "-" for row in table[2:] for cell in row[1:])


def test_a_cell_is_the_verdict_of_its_run_and_leads_there(table: list[list[str]]):
    column = table[0].index("0.32.0 stock")
    verdicts = {row[0]: row[column] for row in table[2:]}
    assert verdicts["FLASH_ATTN"] == "[none, kernels not validated](compat/0.32.0-stock.md)"
    assert verdicts["CHUNKED_LOCAL"] == "[blocks](compat/0.32.0-stock.md)"
    assert verdicts["TREE_ATTN"] == "-"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_how_it_was_made(page: Path):
    release, _, way = page.stem.partition("-")
    text = page.read_text()
    assert f"# vLLM {release}, {'with the plugin' if way == 'plugin' else 'stock'}" in text
    plugin = "--plugin " if way == "plugin" else ""
    source = f"--vllm-source .cache/releases/{release}"
    assert f"vllm-async-spec compat {plugin}{source} --markdown docs/compat/{page.name}" in text
    assert re.search(r", a simulated device, 20\d\d-\d\d-\d\d\. ", text)
