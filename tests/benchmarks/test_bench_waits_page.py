"""What waits, by feature: its table, and its page, which is there once there is a result of a GPU."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docs_modules import DOCS, load
from waits_engines import AUDIT, FACTS

from benchmarks.waits.cases import CASES, ENGINES
from benchmarks.waits.result import published
from benchmarks.waits.table import HEAD, waits_grid, waits_tables

TIMED = {
    "turns": [[[3.0, 40, 1.0], [3.2, 40, 1.0]], [[3.1, 40, 1.0]]],
    "reference": [[[2.0, 40, 1.0]], [[2.1, 40, 1.0]]],
}
CASES_FOUND: dict[str, Any] = {
    "plain": {"turns": [[[2.0, 40, 1.0]]], "audit": AUDIT | {"critical": [0.0, 0.0], "sites": []}},
    "penalties": TIMED | {"audit": AUDIT},
    "top-k": TIMED,  # broken off before its audit
    "seeds": TIMED | {"audit": None},
    "ngram": {"refused": "Model Runner V2 does not yet support: ngram | ngram_gpu"},
    "suffix": {"lacks": "this environment has no package arctic-inference; install it and run again"},
    "eagle": {"failed": "the engine of 'eagle' failed: out of luck"},
}


def write(folder: Path, release: str = "0.32.0", runner: str = "V2", shape: str = "1b", plugin: str = "noop") -> None:
    about = {"release": release, "runner": runner, "shape": shape, "plugin": plugin}
    engines = {"plain": FACTS | {"vllm": release, "runner": runner}, "ngram": FACTS | {"async_scheduling": False}}
    document = {"feature_waits": 1, **about, "commands": ["a command"], "engines": engines, "cases": CASES_FOUND}
    (folder / f"feature-waits-{release}-{runner}-{shape}-{plugin}.json").write_text(json.dumps(document))


@pytest.fixture
def generated() -> ModuleType:
    return load("generated")


def test_a_row_has_the_ratio_the_idle_share_and_the_lines_that_wait(tmp_path: Path):
    write(tmp_path)
    rows = {row[0].split("`")[1]: row for row in waits_grid(published(tmp_path)).rows}
    assert rows.keys() == CASES.keys()
    assert all(len(row) == len(HEAD) for row in rows.values())
    assert rows["plain"][1:] == ("0.32.0 V2", "2.00 (40)", "-", "20%", "0", "none")
    assert rows["penalties"][2:] == (
        "3.10 (120)",
        "1.512 (1.476-1.550)",
        "20%",
        "**1.50** (0.30 ms)",
        "`worker/gpu_model_runner.py:10 in sample` read 1.00; `sample/ops.py:7 in topk` event 0.50",
    )
    assert rows["top-k"][2] == rows["mtp"][2] == "not run"
    assert rows["seeds"][4:] == ("not audited",) * 3
    assert rows["ngram"][1:3] == (
        "0.32.0 V2, synchronous",
        r"vLLM refuses it: “Model Runner V2 does not yet support: ngram \| ngram_gpu”",
    )
    assert rows["suffix"][2].startswith("this environment has no package arctic-inference")
    assert rows["eagle"][2] == "**failed**: the engine of 'eagle' failed: out of luck"


def test_rows_of_one_feature_are_side_by_side(tmp_path: Path):
    for release, runner in (("0.26.0", "V1"), ("0.32.0", "V2"), ("0.26.0", "V2")):
        write(tmp_path, release, runner)
    rows = waits_grid(published(tmp_path)).rows
    assert [row[1] for row in rows[3:6]] == ["0.32.0 V2", "0.26.0 V2", "0.26.0 V1"]
    assert len({row[0] for row in rows[3:6]}) == 1


@pytest.mark.parametrize("shape", ["1b", "8b"])
def test_each_size_has_rows_for_every_case(tmp_path: Path, shape: str):
    write(tmp_path, shape=shape)
    assert [row[0].split("`")[1] for row in waits_grid(published(tmp_path)).rows] == [*CASES]


def test_a_size_without_a_prediction_layer_has_no_rows_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENGINES, "mtp", dataclasses.replace(ENGINES["mtp"], shapes={"1b": "mla-dense"}))
    write(tmp_path, shape="8b")
    assert not any("`mtp`" in row[0] for row in waits_grid(published(tmp_path)).rows)


def test_the_engines_are_described_below_the_table(tmp_path: Path):
    write(tmp_path)
    assert (
        waits_tables(tmp_path, "1b")
        .rstrip()
        .endswith(
            "- vLLM 0.32.0 V2, PyTorch 2.13.0, a device: FLASH_ATTN, compilation mode VLLM_COMPILE, CUDA graphs "
            "FULL_AND_PIECEWISE, asynchronous scheduling, prefix caching on."
        )
    )
    assert waits_tables(tmp_path, "8b") == "The 8b is not measured yet.\n"


def test_what_users_do_not_get_is_not_published(tmp_path: Path, generated: ModuleType):
    write(tmp_path, runner="V1", shape="tiny")  # a CPU
    write(tmp_path, plugin="stock")
    write(tmp_path, plugin="plugin")
    (tmp_path / "feature-waits-of-another-kind.json").write_text("[]")
    assert published(tmp_path) == []
    assert generated.waits(tmp_path) == []


def test_the_page_is_there_with_its_table_once_there_is_a_result(tmp_path: Path, generated: ModuleType):
    write(tmp_path)
    ((name, page),) = generated.waits(tmp_path)
    assert name == "waits.md"
    assert "| `penalties`: presence, frequency and repetition penalties | 0.32.0 V2 | 3.10 (120) |" in page
    assert "The 8b is not measured yet." in page


def test_the_page_is_in_the_navigation_exactly_when_it_is_there(
    tmp_path: Path, generated: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    nav = [{"Overview": "index.md"}, {"Run vLLM": [{"Measured": "measured.md"}, {"More": "more.md"}]}]
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    generated.on_config({"nav": nav})
    assert nav[1] == {"Run vLLM": [{"Measured": "measured.md"}, {"More": "more.md"}]}
    write(tmp_path)
    generated.on_config({"nav": nav})
    assert nav[1] == {
        "Run vLLM": [{"Measured": "measured.md"}, {"What waits, by feature": "waits.md"}, {"More": "more.md"}]
    }
    with pytest.raises(LookupError, match=r"no measured\.md"):
        generated.on_config({"nav": [{"Overview": "index.md"}]})


def test_the_template_explains_every_load_that_a_row_names():
    template = (DOCS / "templates" / "waits.md").read_text(encoding="utf-8")
    for name in ("churn", "plain-mla", "mtp", "ngram", "suffix", "stop-strings"):
        assert f"`{name}`" in template
        assert name in CASES
