"""What `make test-upstream` makes of two arms' records; upstream's tests themselves are not needed here."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent
FILE = "tests/v1/core/test_a.py"
APPLIED = {"min-tokens": "applied", "top-k-bound": "not needed"}


@pytest.fixture(scope="module")
def verdicts() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("verdicts")
    sys.path.remove(str(FOLDER))


@pytest.fixture
def record(verdicts, tmp_path):
    def made(cases: dict[str, str], plugin=None, ended: str = "exit 1", name: str = "a"):
        lines = [{"plugin": plugin}]
        lines += [{"case": f"{FILE}::{case}", "outcome": outcome, "detail": ""} for case, outcome in cases.items()]
        lines += [{"plugin": plugin}] if ended.startswith("exit") else []
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, [*lines, {"file": FILE, "ended": ended}])) + '\n{"cut o')
        return verdicts.read_record(path)

    return made


def test_equal_records_do_not_differ(verdicts, record):
    both = [record({"x": "passed", "y": "failed"})]
    assert verdicts.differing(FILE, both, both) == []
    assert verdicts.counted(FILE, both[0], both[0]) == {"passed": 1, "failed": 1}


@pytest.mark.parametrize(
    ("cases", "ended", "case"),
    [
        ({"x": "failed"}, "exit 1", "::x"),
        ({}, "exit 1", "::x"),
        ({"x": "passed", "y": "passed"}, "exit 1", "::y"),
        ({"x": "passed"}, "exit 0", " (process)"),
        ({"x": "passed"}, "timed out after 600 s", " (process)"),
        ({"x": "passed"}, "killed by signal 11", " (process)"),
    ],
    ids=["another outcome", "lost", "more", "another exit", "hung", "crashed"],
)
def test_a_result_that_stock_never_has_differs(verdicts, record, cases, ended, case):
    stock, plugin = record({"x": "passed"}), record(cases, APPLIED, ended)
    assert [each.case for each in verdicts.differing(FILE, [stock], [plugin])] == [FILE + case]


def test_a_case_that_differs_in_stock_alone_is_not_the_plugins(verdicts, record):
    passed, failed = record({"x": "passed"}), record({"x": "failed"})
    assert verdicts.differing(FILE, [passed, failed], [failed, passed]) == []
    assert verdicts.differing(FILE, [passed, passed, passed], [passed, failed, passed])


def test_where_both_break_off_what_one_did_not_reach_is_not_compared(verdicts, record):
    stock = record({"x": "passed", "y": "passed"}, ended="killed by signal 6")
    shorter = record({"x": "passed"}, APPLIED, ended="killed by signal 6")
    other = record({"x": "failed"}, APPLIED, ended="killed by signal 6")
    assert verdicts.differing(FILE, [stock], [shorter]) == []
    assert len(verdicts.differing(FILE, [stock], [other])) == 1


def test_an_arm_that_is_not_what_it_is_called_is_refused(verdicts, record):
    loaded, bare = record({"x": "passed"}, APPLIED), record({"x": "passed"})
    assert verdicts.refusals_of_plugin(FILE, loaded, ["min-tokens"]) == []
    assert verdicts.refusals_of_stock(FILE, bare) == []
    assert verdicts.refusals_of_plugin(FILE, bare, []) == [f"{FILE}: vLLM did not load the plugin"]
    assert verdicts.refusals_of_plugin(FILE, loaded, ["top-k-bound"]) == [
        f"{FILE}: not applied top-k-bound; refused none"
    ]
    assert verdicts.refusals_of_stock(FILE, loaded) == [f"{FILE}: the plugin is loaded in stock vLLM"]
    nothing = verdicts.FileRecord()
    assert verdicts.refusals_of_plugin(FILE, nothing, []) == verdicts.refusals_of_stock(FILE, nothing)
    assert "recorded nothing" in verdicts.refusals_of_stock(FILE, nothing)[0]


def test_an_empty_run_does_not_pass(verdicts):
    assert verdicts.too_few({"v1/core": 5}, {"v1/core": 5}) == []
    assert verdicts.too_few({}, {"v1/core": 5}) == ["v1/core: 0 cases passed in both, at least 5 must"]
