"""What waits, by feature, on vLLM's CPU platform."""

import json
from pathlib import Path

import pytest
from bench_command import bench


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.usefixtures("cpu_platform")
def test_log_probabilities_wait_where_plain_decoding_does_not(tmp_path: Path):
    cases = ["plain", "json-1", "logprobs-1", "n-4", "eagle"]
    options = ["--cpu", "--seconds", "0.2", "--cache", str(tmp_path)]
    done = bench("features", "--audit", *cases, *options)
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "results").iterdir()
    found = json.loads(path.read_text())
    assert found["cases"].keys() == set(cases)
    assert found["engines"]["plain"]["plugin"] == "off"
    lines = {name: {line for line, _, _ in case["audit"]["sites"]} for name, case in found["cases"].items()}
    assert len(lines["plain"]) == 1
    assert lines["json-1"] == lines["n-4"] == lines["plain"]
    assert sum("LogprobsTensors.tolists" in line for line in lines["logprobs-1"] - lines["plain"]) == 3
    assert any("_get_draft_token_ids_cpu" in line for line in lines["eagle"])
    steps = {name: [run[1] for turn in case["turns"] for run in turn] for name, case in found["cases"].items()}
    assert all(count > 180 for name in ("plain", "json-1", "n-4") for count in steps[name]), "no request ends early"
    assert found["cases"]["eagle"]["turns"][0][0][2] > 2, "drafts are accepted"
