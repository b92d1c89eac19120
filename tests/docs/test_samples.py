"""The Python samples of the documentation run, and print what stands below them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / ".cache" / "releases" / "0.26.0"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
# One process a page, as a reader would paste one sample after another into a prompt.
RUN = """
import contextlib, io, json, sys
page, samples = json.load(sys.stdin)
space, printed = {"__name__": "__main__"}, []
for text in samples:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, f"{page}.py", "exec"), space)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def samples(page: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for language, text in FENCE.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
        if language == "python":
            found.append((text, None))
        elif language == "text" and found and found[-1][1] is None:
            found[-1] = (found[-1][0], text)
    return found


def check(page: str, chosen: list[tuple[str, str | None]]) -> None:
    assert any(expected for _, expected in chosen)
    document = json.dumps([page, [text for text, _ in chosen]])
    done = subprocess.run([sys.executable, "-c", RUN], input=document, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == [expected or "" for _, expected in chosen]


@pytest.mark.parametrize("page", ["concepts", "metadata"])
def test_each_sample_prints_what_stands_below_it(page: str):
    check(page, [sample for sample in samples(page) if "load_vllm" not in sample[0]])


@pytest.mark.skipif(not RELEASE.is_dir(), reason="`make test-releases` unpacks the release that the sample reads")
def test_the_sample_that_reads_an_unpacked_release():
    check("metadata", [sample for sample in samples("metadata") if "load_vllm" in sample[0]])
