"""The benchmark of continuous batching, on a CPU: what it measures, and when it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

from benchmarks import batching
from benchmarks.cli import app

SMALL = ["--device", "cpu", "--batch", "2", "--new-tokens", "4", "--passes", "2"]
LINES = {
    "size": "tiny",
    "device": "cpu",
    "batch": 2,
    "requests": 3,
    "prompt": 5,
    "new_tokens": 4,
    "passes": 1,
    "attention": "auto",
}


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["batching", *options])


@pytest.mark.parametrize("requests", [2, 3])
def test_all_arms_are_measured_and_give_the_same_tokens(requests: int, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    done = run(*SMALL, "--requests", str(requests), "--json", str(result))
    assert done.exit_code == 0, done.output
    found = json.loads(result.read_text())
    assert tuple(found["tokens_per_second"]) == batching.ARMS
    assert all(len(speeds) == 2 for speeds in found["tokens_per_second"].values())
    assert all(min(speeds) > 0 for speeds in found["tokens_per_second"].values())
    assert found["equal_tokens"] == dict.fromkeys(batching.ARMS, 1.0)
    assert found["gpu_busy"] == {}
    assert "nothing can be won on a CPU" in done.output


def test_other_tokens_are_refused_and_a_stranger_s_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = batching._arms
    wrong = "transformers"

    def altered(*args: Any) -> Any:
        runs, described = arms(*args)
        whole = runs[wrong]

        def alter(new_tokens: int) -> list[list[int]]:
            found = whole(new_tokens)
            found[2][3] ^= 1
            return found

        return runs | {wrong: alter}, described

    monkeypatch.setattr(batching, "_arms", altered)
    found = batching.measure(**LINES, arms=list(batching.ARMS))
    assert found["equal_tokens"]["transformers"] == pytest.approx(11 / 12)
    wrong = "asynchronous"
    with pytest.raises(
        batching.BatchingError, match="asynchronous generates other tokens than synchronous, from token 3"
    ):
        batching.measure(**LINES, arms=["synchronous", "asynchronous"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "large"], "the model is 'large'; it must be one of tiny, 1b, 8b"),
        (["--arms", "mine"], "the arms have 'mine'; they must be of synchronous, synchronous again, asynchronous"),
        (["--attention", "FAST"], "attention is 'FAST'; it must be auto, FLASH_ATTN, FLASHINFER_TRTLLM"),
    ],
)
def test_what_can_not_be_run_is_refused_in_one_sentence(options: list[str], message: str) -> None:
    done = run(*SMALL, *options)
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output
