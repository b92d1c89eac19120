"""The examples run as a reader would run them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


RUN = """
import runpy, sys
for example in sys.argv[1:]:
    print("== " + example, flush=True)
    runpy.run_path(example, run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each example prints, by its name; one process for all, because importing transformers takes longest."""
    pytest.importorskip("transformers", reason="pip install 'vllm-async-spec[transformers]'")
    paths = sorted(map(str, EXAMPLES.glob("*.py")))
    done = subprocess.run([sys.executable, "-c", RUN, *paths], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = (part.partition("\n") for part in done.stdout.split("== ")[1:])
    return {Path(path).stem: text for path, _, text in parts}


def test_every_example_is_run(printed: dict[str, str]):
    assert printed.keys() == {"async_stopping", "continuous_batching", "interleaving"}


def test_interleaving(printed: dict[str, str]):
    assert "interleaved: the same tokens" in printed["interleaving"]


def test_async_stopping(printed: dict[str, str]):
    assert "custom_generate: the same tokens" in printed["async_stopping"]
    assert "async_stopping_criteria: the same tokens" in printed["async_stopping"]


def test_continuous_batching(printed: dict[str, str]):
    text = printed["continuous_batching"]
    assert "6 requests, the same tokens" in text
    assert "with a draft model: the same tokens" in text
    assert text.count("streamed ") == 3
