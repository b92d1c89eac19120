"""The tables of vLLM's builders, which the site makes from the published runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs_modules import DOCS, load

from vllm_async_spec.audit.remedies import BY_CALL, BY_KIND
from vllm_async_spec.compat.archive import read_archive, write_archive
from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.publish import WANTED, documents
from vllm_async_spec.compat.report import NOT_RUN

RUNS = {run.name: run for run in read_archive(DOCS / "compat")}


@pytest.fixture(scope="module")
def hooks() -> Any:
    return load("hooks")


def table(hooks: Any, machine: str) -> list[list[str]]:
    made = hooks.on_page_markdown(f"<!-- compat: table {machine} -->")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines()]


def test_each_run_is_a_column_and_each_backend_a_row(hooks: Any):
    rows = table(hooks, "cpu")
    simulated = [name for name, run in RUNS.items() if run.device == "cpu"]
    assert len(rows[0]) == len(simulated) + 1 == len(rows[1])
    assert [row[0] for row in rows[2:]] == list(BACKENDS)
    assert {cell for row in rows[2:] for cell in row[1:] if not cell.startswith("[")} <= {
        why for run in RUNS.values() for why in run.absent.values()
    }


def test_a_cell_is_the_verdict_of_its_run_and_leads_there(hooks: Any):
    rows = table(hooks, "cpu")
    column = rows[0].index("0.32.0 stock")
    verdicts = {row[0]: row[column] for row in rows[2:]}
    assert verdicts["FLASH_ATTN"] == "[none, kernels not validated](compat/0.32.0-stock.md#flash_attn)"
    assert verdicts["CHUNKED_LOCAL"] == "[blocks, wrong after updates](compat/0.32.0-stock.md#chunked_local)"
    assert verdicts["FLASHINFER"] == "[blocks](compat/0.32.0-stock.md#flashinfer)"
    assert verdicts["TREE_ATTN"] == "this release has none"
    assert all(f"](compat/{stem}.md" in cell for cell, stem in zip(rows[2][1:], map(_stem, rows[0][1:]), strict=True))


def _stem(head: str) -> str:
    return head.replace(" ", "-")


def test_a_link_leads_to_a_heading_or_to_the_whole_page(hooks: Any):
    pages = documents(list(RUNS.values()))
    for row in table(hooks, "cpu")[2:]:
        for cell in row[1:]:
            if cell.startswith("["):
                page, _, heading = cell.partition("](")[2].removesuffix(")").partition("#")
                text = pages[page]
                assert (f"## {row[0]}\n" in text) is (heading == row[0].lower())


def test_the_page_asks_for_the_advice_on_each_wait(hooks: Any):
    made = hooks.on_page_markdown((DOCS / "compatibility.md").read_text(encoding="utf-8"))
    for wait, instead in ({kind.value: each for kind, each in BY_KIND.items()} | BY_CALL).items():
        assert (f"| `{wait}` | {instead} |\n" in made) is (wait != "warning")


def test_what_nobody_ran_on_a_gpu_says_so(hooks: Any):
    rows = table(hooks, "h200")
    assert rows[0][1:] == [f"{release} {way} {machine}" for release, way, machine in WANTED]
    for column, stem in enumerate(map(_stem, rows[0][1:]), 1):
        cells = {row[column] for row in rows[2:]}
        assert (cells == {"not run"}) is (stem not in RUNS)


def test_a_cell_says_that_attention_is_right(hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RUNS["0.32.0-stock"]
    (row,) = [replace(row, attention="right, 16 of 16 batches") for row in run.rows if row.backend == "LINEAR"]
    write_archive(tmp_path, [replace(run, rows=[row], absent={})])
    monkeypatch.setattr(hooks, "COMPAT", tmp_path)
    assert table(hooks, "cpu")[2][1].startswith("[none, attention right](")
    write_archive(tmp_path, [replace(run, rows=[replace(row, attention=NOT_RUN)], absent={})])
    assert table(hooks, "cpu")[2][1].startswith("[none](")
