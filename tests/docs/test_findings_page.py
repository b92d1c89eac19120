"""docs/findings.md: its commands name tests, releases and backends that there are."""

import re
from pathlib import Path

from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.fetch import RELEASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings.md").read_text()
COMMANDS = "tests/docs/test_findings_commands.py"
GPU_TESTS = re.findall(r"GPU\s+test\s+`(\w+)`", PAGE)


def test_each_test_that_it_names_is_there():
    named = re.findall(r"(tests/\S+\.py) -k (\w+)", PAGE) + [(COMMANDS, words) for words in GPU_TESTS]
    assert len(named) >= 25
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
    assert len(findings) == 19
    for finding in findings:
        status = re.search(
            r"^Status: (confirmed on (CPU|(one|two) H[12]00)|by reading only|refuted)", finding, re.MULTILINE
        )
        assert status, finding[:60]


def test_each_gpu_test_is_told_of():
    tests = re.findall(r"def (test_\w+)", (ROOT / COMMANDS).read_text())
    assert COMMANDS in PAGE
    assert [test for test in tests if not any(word in test for word in GPU_TESTS)] == []
