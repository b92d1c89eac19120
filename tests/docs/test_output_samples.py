"""Samples of output in the documentation are what the code says: log lines, metrics, the comparison of a release."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_async_spec.vllm_plugin.ledger import State, load_ledger
from vllm_async_spec.vllm_plugin.ledger.verify import Match
from vllm_async_spec.vllm_plugin.metrics.collector import Collector
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine, Snapshot
from vllm_async_spec.vllm_plugin.settings import Settings

ROOT = Path(__file__).parents[2]
COUNTS = re.compile(r"(\d+) applied, (\d+) not needed")
PLACEHOLDER = re.compile(r"%(?:\.\d+)?[sdf]")


def sample(page: str, first: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = [each.splitlines() for each in re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    return next(lines for lines in found if lines[0].strip().startswith(first))


def logged() -> Iterator[re.Pattern[str]]:
    """Each line that the plugin may log, with anything in place of its arguments."""
    for path in (ROOT / "vllm_async_spec" / "vllm_plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = node.value if isinstance(node, ast.Constant) else None
            if isinstance(said, str) and said.startswith("vllm-async-spec"):
                yield re.compile(".+".join(map(re.escape, PLACEHOLDER.split(said))))


@pytest.mark.parametrize(
    ("page", "first"),
    [("settings", "vllm-async-spec 0.1.0 is on"), ("flashinfer", "vllm-async-spec: FlashInfer decodes with XQA")],
)
def test_each_line_of_a_log_is_one_that_the_plugin_writes(page: str, first: str):
    known = list(logged())
    for line in sample(page, first):
        said = line[line.index("vllm-async-spec") :]
        assert any(each.fullmatch(said) for each in known), said


def test_each_metric_is_exported_with_these_labels():
    found = Snapshot(engines=[Engine(True, "vLLM", "V2", "FLASH_ATTN")])
    found.patches["patch"] = State.APPLIED
    found.fallbacks["min_tokens"] = 1
    found.add_wait("cause", "copy", 1, 0.5)
    exported = {
        each.name: set(each.labels)
        for family in Collector(lambda: found, Settings.read({})).collect()
        for each in family.samples
    }
    shown = [each for family in text_string_to_metric_families("\n".join(metrics())) for each in family.samples]
    assert len(shown) == len(metrics())
    assert all(exported.get(each.name) == set(each.labels) for each in shown)


def test_the_cause_of_a_wait_is_the_line_that_waits():
    causes = re.findall(r"(\w+) at (\S+\.py):(\d+) ", "\n".join(metrics()))
    assert causes
    for read, file, line in causes:
        assert f'host_read("{read}"' in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def metrics() -> list[str]:
    return sample("metrics", "vllm:async_spec_host_waits_total")


def test_the_samples_count_the_same_patches():
    """The sample of `status` is compared with what `status` prints in tests/test_cli.py."""
    status = COUNTS.search("\n".join(sample("index", "vllm-async-spec")))
    log = COUNTS.search("\n".join(sample("settings", "vllm-async-spec 0.1.0 is on")))
    exported = re.findall(r'state="(?:applied|not needed)"} (\d+)', "\n".join(metrics()))
    assert status is not None
    assert log is not None
    assert status.groups() == log.groups() == tuple(exported)


def test_the_comparison_of_a_release_shows_the_ledgers_fingerprints():
    title, *lines = sample("patches", "vLLM 0.33.0")
    release = title.split()[-1]
    specs = {spec.name: spec for spec in load_ledger()}
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert len(rows) == 3
    for name, verdict, known, codes in rows:
        if verdict == Match.NOT_NEEDED.value:
            assert release not in specs[name].releases
        else:
            assert known == release
            expected = [
                target.fingerprints[release] for target in specs[name].targets if release in target.fingerprints
            ]
            assert codes.split(", ") == expected
