"""Results as they are committed: shared parts written once, and every record back as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import as_text, read_json, restored, shortened
from benchmarks.results import RESULTS

FACTS = {"vllm": "0.32.0", "backends": ["FLASHINFER"], "hardware": {"device": "a GPU", "cores": 16}}
TURNS = [
    {"pass": number, "arm": arm, "facts": FACTS, "loads": {"decode": {"n": 2, "step_ms": 1.5 + number}}}
    for number in range(4)
    for arm in ("stock", "noop")
]


@pytest.mark.parametrize(
    "value",
    [
        TURNS,
        [*TURNS, {"pass": 9, "arm": "noop", "error": "it died"}, *TURNS],
        {f"{turn['pass']} {turn['arm']}": turn for turn in TURNS},
        [{"sign": "$", "same": "$", "of": [{"a": "$"}, 1, [], {}]} for _ in range(30)],
        [{"exact": number, "other": {}, "empty": []} for number in (1, 1.0, True, 1, None, "1")] * 5,
        [{"causes": [{"site": "a.py:1"}] * count, "more": "x" * 40} for count in (0, 1, 0, 2, 1, 0)],
        [{"b": 1, "a": 2, "c": "x" * 40}, {"a": 1, "b": 2, "c": "x" * 40}] * 4,
        [[1, 2], [3, 4]],
        [{}, {}],
        [],
        None,
    ],
)
def test_every_value_comes_back_as_it_was(value: Any):
    assert json.dumps(restored(shortened(value))) == json.dumps(value)
    document = {"it": value, "nested": {"deeper": [value, value]}}
    assert json.dumps(restored(json.loads(as_text(document)))) == json.dumps(document)


def test_what_all_records_share_is_written_once():
    text = as_text({"turns": TURNS})
    assert text.count("a GPU") == text.count("step_ms") == 1
    assert '\n  [3,"noop",4.5]\n' in text
    assert len(text) < len(json.dumps({"turns": TURNS})) / 3


def test_a_value_that_would_read_back_as_another_is_refused():
    with pytest.raises(ValueError, match="no result may have just the names each and rows"):
        as_text({"it": {"each": [], "rows": []}})


@pytest.mark.parametrize("rows", ["[[2, 1]]", "[[0]]", "[[]]", "[[0, 1, 2]]", "[1]", "1", "null"])
def test_rows_that_fit_no_template_are_told_in_one_sentence(rows: str, tmp_path: Path):
    path = tmp_path / "wrong.json"
    path.write_text(f'{{"turns": {{"each": [{{"a": "$"}}, {{"b": "$"}}], "rows": {rows}}}}}')
    with pytest.raises(ValueError, match=r"wrong.json has rows that do not fit their templates"):
        read_json(path)


def test_a_file_of_another_program_is_written_anew(tmp_path: Path):
    path = tmp_path / "demo.json"
    path.write_text(json.dumps({"turns": TURNS}, indent=2))
    subprocess.run([sys.executable, "-m", "benchmarks.records", str(path)], check=True)
    assert path.read_text() == as_text({"turns": TURNS})
    path.write_text("[]")
    done = subprocess.run([sys.executable, "-m", "benchmarks.records", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n"), "Traceback" in done.stderr) == (1, 1, False)
    assert "demo.json can't be written anew" in done.stderr


def test_every_committed_result_is_as_this_version_writes_it():
    assert [path.name for path in RESULTS.glob("*.json") if path.read_text() != as_text(read_json(path))] == []
