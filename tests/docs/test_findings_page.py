"""docs/findings.md: its commands name tests, releases and backends that there are."""

import re
from pathlib import Path

from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.fetch import RELEASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings.md").read_text()


def test_each_test_that_it_names_is_there():
    named = re.findall(r"(tests/\S+\.py) -k (\w+)", PAGE)
    assert len(named) >= 11
    for file, words in named:
        tests = re.findall(r"def (test_\w+)", (ROOT / file).read_text())
        assert [test for test in tests if words in test], f"{file} has no test with {words}"


def test_each_run_of_the_suite_that_it_names_is_possible():
    runs = re.findall(r"(\d+\.\d+\.\d+) --backend (\w+)", PAGE)
    assert len(runs) >= 10
    assert {release for release, _ in runs} <= set(RELEASES)
    assert {backend for _, backend in runs} <= BACKENDS.keys()


def test_each_finding_has_a_status():
    findings = PAGE.partition("## Wrong values")[2].split("\n### ")[1:]
    assert len(findings) == 15
    for finding in findings:
        status = re.search(r"^Status: (confirmed on (CPU|one H200)|by reading only|refuted)", finding, re.MULTILINE)
        assert status, finding[:60]


def test_each_gpu_test_is_told_of():
    tests = re.findall(r"def (test_\w+)", (ROOT / "tests" / "docs" / "test_findings_commands.py").read_text())
    words = re.findall(r"tests/docs/test_findings_commands.py -k (\w+)", PAGE)
    assert [test for test in tests if not any(word in test for word in words)] == []
