"""The audit on a real vLLM."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, python_path
from scenario import environment

from vllm_async_spec.demo.train import DemoModels

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLANTED = Path(__file__).parents[1] / "support" / "audit_planted"
KINDS = ("read", "copy to host", "event")
"""What can be told without a GPU; whether memory is pinned can't."""


def audit(models: DemoModels, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    drafting = {"method": "draft_model", "model": str(models.draft), "num_speculative_tokens": 3}
    engine = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "768"]
    command = [*COMMAND, "audit", "--model", str(models.target), *engine, "--speculative-config", json.dumps(drafting)]
    recorded = ["--batch", "4", "--steps", "12", "--log", str(folder / "engine.log"), *options]
    # In one process, which is the other of vLLM's layouts: the server below has the worker in one of its own.
    plugin = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}
    plugin.pop("VLLM_ASYNC_SPEC", None)
    return subprocess.run([*command, *recorded], env=plugin, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def planted(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("planted")
    files = ["--json", str(folder / "report.json"), "--html", str(folder / "report.html")]
    done = audit(models, folder, *files, PYTHONPATH=python_path(PLANTED), PLANTED_WAITS=",".join(KINDS))
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())["report"]
    return report | {"terminal": done.stdout, "page": (folder / "report.html").read_text()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_wait_is_found_at_its_line(planted: dict[str, Any], kind: str):
    source = (PLANTED / "planted_backend.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if text.endswith(f"# planted: {kind}"))
    found = [cause for cause in planted["causes"] if cause["stack"][0]["line"] == line]
    assert [(cause["kind"], cause["place"], cause["phase"]) for cause in found] == [
        (kind, "critical", "metadata building")
    ]
    assert found[0]["stack"][0]["file"] == "audit_planted/planted_backend.py"
    # Of the target once a step, and of the drafter at least once.
    assert found[0]["per_step"] >= 2
    for shown in (planted["terminal"], planted["page"]):
        assert f"planted_backend.py:{line}" in shown


def test_nothing_but_what_was_planted_is_on_the_critical_path(planted: dict[str, Any]):
    critical = [cause["stack"][0]["file"] for cause in planted["causes"] if cause["place"] == "critical"]
    assert critical == ["audit_planted/planted_backend.py"] * len(KINDS)
    assert planted["engine"]["async_scheduling"]
    assert planted["headline"] == "On a GPU the host would wait on the critical path"
    assert "planted_backend.py:" in planted["sentence"]
    assert planted["simulated"]


def test_arguments_that_vllm_refuses_end_with_one_sentence(models: DemoModels, tmp_path: Path):
    done = audit(models, tmp_path, "--no-such-argument", "3")
    assert done.returncode == 1
    assert done.stderr.startswith("vllm-async-spec: the engine could not be audited: ")
    assert "unrecognized arguments: --no-such-argument 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_comparison_shows_what_the_plugin_takes_off_the_critical_path(models: DemoModels, tmp_path: Path):
    file = tmp_path / "report.json"
    done = audit(models, tmp_path, "--compare", "off", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    waits = {
        when: sum(cause["per_step"] for cause in found[when]["causes"] if cause["place"] == "critical")
        for when in ("before", "report")
    }
    assert waits == {"before": pytest.approx(2), "report": 0}
    assert found["before"]["engine"]["plugin"] == "off"
    assert "Before: Asynchronous scheduling is off" in done.stdout
