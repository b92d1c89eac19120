"""Tables of documents and figures, from results."""

import dataclasses
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from bench_command import bench
from bench_documents import FACTS, PLAN, STEADY, document
from rich.console import Console
from test_bench_waits_page import generated

from benchmarks import published
from benchmarks.arms import Acceptance
from benchmarks.plans import find_plan
from benchmarks.present import Grid, notes
from benchmarks.results import RESULTS, result_files, trace_files
from benchmarks.serving.results import served_files
from benchmarks.tables import TableError, documents, rewrite

__all__ = ["generated"]  # a fixture


def test_the_figures_of_the_documents_are_those_of_the_results():
    done = bench("fill", "--check")
    assert done.exit_code == 0, done.output


def test_the_site_makes_each_table_that_a_page_asks_for(generated: ModuleType):
    made = {path.name: generated.with_tables(path.read_text(), path) for path in documents()}
    assert not any("<!-- table: " in text for text in made.values())
    assert "| plugin | 70 (68-78) | " in made["measured-flashinfer.md"]
    with pytest.raises(TableError, match=r"a.md asks for the results 'nothing', and .* does not exist"):
        generated.with_tables("<!-- table: nothing -->", Path("a.md"))


PLACE = "before <!-- measured: ratios made-up plugin decode-* -->0.9<!-- end of measured --> after\n"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "made-up.json").write_text(json.dumps(document(STEADY)))
    readme = tmp_path / "README.md"
    readme.write_text(PLACE)
    monkeypatch.setattr("benchmarks.cli.results.documents", lambda: [readme])
    monkeypatch.setattr("benchmarks.cli.results.rewrite", lambda paths: rewrite(paths, tmp_path))
    return readme


def test_a_figure_is_written_into_its_sentence_and_stale_when_its_result_changes(written: Path):
    assert bench("fill", "--check").exit_code == 1
    assert bench("fill").exit_code == 0
    assert written.read_text() == PLACE.replace(">0.9<", ">1.0<")
    assert bench("fill", "--check").exit_code == 0
    (written.parent / "made-up.json").write_text(json.dumps(document(STEADY | {"plugin": [121] * 4})))
    stale = bench("fill", "--check")
    assert stale.exit_code == 1
    assert "stale figures in README.md" in stale.output
    assert ">1.2<" in rewrite([written], written.parent)[written]


def test_the_control_of_several_results_is_one_figure_in_which_each_counts_once(written: Path):
    for number, (noop, backend) in enumerate(((90, "A"), (110, "A"), (50, "B"))):
        arms = tuple(dataclasses.replace(arm, engine={"attention_backend": backend}) for arm in PLAN.arms)
        found = document(STEADY | {"noop": [noop] * 4}, dataclasses.replace(PLAN, arms=arms))
        (written.parent / f"defaults-{number}.json").write_text(json.dumps(found))
    said = published.in_words_of(["control", "A"], written.parent)
    assert said.startswith("0.99 (0.")
    assert said.endswith(", 2 pairs of engines)")


def test_a_page_gets_the_table_of_a_result(generated: ModuleType, written: Path):
    page = generated.with_tables("<!-- table: made-up -->\n", written, written.parent)
    assert "| decode-1 | plugin | yes | 9.48 (9.35-9.52) | 211 (210-214) | 2.00 | 1.050 (1.0" in page


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "a <!-- measured: ratios made-up none * -->",
            "README.md asks for 'ratios made-up none *', which no result has",
        ),
        ("a <!-- measured: ratios made-up -->", "README.md asks for 'ratios made-up', which no result has"),
        ("a <!-- measured: tpot made-up plugin decode-1 p50 -->", "made-up is no result of a served plan"),
        ("a <!-- measured: control FLASH_ATTN -->", "there are fewer than two such results"),
        ("a <!-- measured: speed made-up -->", "README.md asks for 'speed made-up'"),
        ("a\n<!-- measured: ratios made-up plugin * -->", "README.md begins a line with <!-- measured: ratios"),
    ],
)
def test_a_figure_that_no_result_has_is_named(written: Path, text: str, sentence: str):
    written.write_text(f"{text}1.0<!-- end of measured -->\n")
    with pytest.raises(TableError) as refused:
        rewrite([written], written.parent)
    assert sentence in str(refused.value)


def test_speeds_at_defaults_have_all_ratios_and_what_is_missing(tmp_path: Path):
    plan = find_plan("defaults-8b-K5")
    speeds = {"stock": [100.0] * 4, "noop": [100.0] * 4, "plugin": [200.0] * 4, "FLASH_ATTN": [160.0] * 4}
    facts = FACTS | {"runner": "V2"}
    (tmp_path / "defaults-8b-K5.json").write_text(json.dumps(document(speeds, plan, facts)))
    (tmp_path / "defaults-8b-K5-h100.json").write_text(
        json.dumps(document({"noop": [100.0]}, plan, facts | {"hardware": {"device": "another"}}))
    )
    table = published.variants(tmp_path)
    rows = [line for line in table.splitlines() if line.startswith("| 0.32.0, V2, FLASHINFER, 8b, ")]
    assert [row.split(", ", 4)[4].split(" | ")[:2] for row in rows] == [
        [device, f"decode-{batch}, 5"] for device in ("another", "a device") for batch in (1, 32, 128)
    ]
    assert rows[3].endswith(
        "| 10.00 (10.00-10.00) ms | 10.00 (10.00-10.00) ms | 5.00 (5.00-5.00) ms | 1.000 (1.000-1.000) | "
        "2.000 (2.000-2.000) | 1.250 (1.250-1.250) | 4 |"
    )
    assert rows[0].endswith("| - | 10.00 (10.00-10.00) ms | - | - | - | - | 1 |")
    assert "The plugin is slower than stock by more than noise in: no cell." in table
    slow = document(speeds | {"FLASH_ATTN": [250.0] * 4}, plan, facts)
    (tmp_path / "defaults-8b-K5.json").write_text(json.dumps(slow))
    behind = ", ".join(f"defaults-8b-K5 decode-{batch}" for batch in (1, 32, 128))
    assert f"The plugin is slower than FLASH_ATTN by more than noise in: {behind}." in published.variants(tmp_path)
    assert "Not measured yet: 8b (K1, K7, K7-graphs, context); 1b (K1, K5, K7, K7-graphs, context); " in table
    assert "tp2" not in table
    assert "Not measured yet: 8b; 1b; " in published.defaults(tmp_path)
    assert "8b-tp2; " in published.defaults(tmp_path)
    larger = document({"noop": [100.0]}, find_plan("defaults-8b-K7-graphs"), facts)
    (tmp_path / "defaults-8b-K7-graphs.json").write_text(json.dumps(larger))
    assert "| decode-128, 7, graphs up to 1,024 tokens |" in published.variants(tmp_path)
    several = document({"noop": [100.0]}, find_plan("defaults-8b-tp2"), facts)
    (tmp_path / "defaults-8b-tp2.json").write_text(json.dumps(several))
    table = published.defaults(tmp_path)
    assert "| 0.32.0, V2, FLASHINFER, 8b, 2 a device | decode-1, 3 |" in table
    assert "8b-tp2; " not in table
    assert "decode-1, 5" not in table


def test_the_plugins_v1_is_compared_with_v2_where_both_ran(tmp_path: Path):
    v2 = dataclasses.replace(PLAN.arms[0], name="V2", runner="V2")
    plan = dataclasses.replace(PLAN, arms=(*PLAN.arms, v2))
    (tmp_path / "v1-both.json").write_text(json.dumps(document(STEADY | {"V2": [200] * 4}, plan)))
    (tmp_path / "v1-without.json").write_text(json.dumps(document(STEADY, plan)))
    (tmp_path / "defaults-both.json").write_text(json.dumps(document(STEADY | {"V2": [200] * 4}, plan)))
    head, _, *rows = (line.strip("| ").split(" | ") for line in published.runners(tmp_path).strip().splitlines())
    assert [dict(zip(head, row, strict=True))["load"] for row in rows] == ["decode-1", "mixed"]
    assert all(row[-2].startswith("0.5") for row in rows)


def test_an_acceptance_that_is_not_what_was_asked_for_is_said():
    arms = tuple(dataclasses.replace(arm, acceptance=Acceptance(0.7)) for arm in PLAN.arms)
    found = document(STEADY, dataclasses.replace(PLAN, arms=arms, loads=PLAN.loads[:1]))
    said = [f"{arm.name}, decode-1: accepted is 2.00, and 2.53 was asked for." for arm in arms]
    assert notes(found) == said


def test_a_failure_is_told_once_and_in_short():
    found = document(STEADY)
    error = "the engine of 'stock' failed: " + "out of memory " * 40
    found["turns"] += [{"pass": number, "arm": "stock", "error": error} for number in (8, 9)]
    (said,) = notes(found)
    assert said.startswith("the engine of 'stock' failed: out of memory")
    assert said.endswith(" ...")
    assert len(said) <= 240


@pytest.mark.parametrize("form", ["svg", "png"])
@pytest.mark.parametrize("speeds", [STEADY, STEADY | {"noop": [95, 96, 95, 96]}], ids=["told", "refused"])
def test_a_comparison_is_drawn(tmp_path: Path, form: str, speeds: dict[str, list[float]]):
    pytest.importorskip("matplotlib")
    result = tmp_path / "result.json"
    result.write_text(json.dumps(document(speeds)))
    done = bench("plot", str(result), "--format", form)
    assert done.exit_code == 0, done.output
    picture = result.with_suffix(f".{form}").read_bytes()
    assert picture.startswith(b"\x89PNG" if form == "png" else b"<?xml")
    assert len(picture) > 5000


def test_each_figure_that_a_page_shows_has_a_result_and_none_is_in_git():
    docs = RESULTS.parents[1] / "docs"
    shown = set(re.findall(r"assets/results/([\w.-]+)\.svg", "".join(p.read_text() for p in docs.glob("*.md"))))
    assert len(shown) > 5
    assert shown <= {path.stem for path in [*result_files(), *served_files(), *trace_files()]}
    assert not (docs / "assets" / "results").exists()


def test_a_result_of_another_schema_is_refused(tmp_path: Path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document(STEADY) | {"schema": 0}))
    done = bench("show", str(path))
    assert done.exit_code == 1
    assert "has schema 0; this version reads only schema 1" in done.output


def test_a_plan_without_any_turn_has_nothing_to_show():
    assert document({}, dataclasses.replace(PLAN))["summary"] == []


def test_a_narrow_terminal_gets_every_number():
    """A cell that does not fit goes on in the next line."""
    printed = io.StringIO()
    Console(width=16, file=printed).print(Grid(("speed",), [("1.234 (1.111111-1.357777)",)]).table("title"))
    assert "1.234(1.111111-1.357777)" in "".join(re.findall(r"[\d.()-]", printed.getvalue()))
