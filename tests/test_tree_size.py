"""The repository stays small: what is generated or recorded is compressed, or made when it is asked for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 4_000_000
"""Bytes of all files in git, of which measurements and generated files are a sixtieth."""


@pytest.fixture(scope="module")
def tree() -> dict[str, int]:
    """Bytes of each file in git, as in the working tree."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed, so nobody says which files are in it")
    listed = subprocess.run([git, "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    top = subprocess.run([git, "-C", str(ROOT), "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if listed.returncode or Path(top.stdout.strip()).resolve() != ROOT.resolve():
        pytest.skip(f"{ROOT} is no git repository, so nobody says which files are in it")
    return {
        name: (ROOT / name).lstat().st_size for name in listed.stdout.split("\0") if name and (ROOT / name).exists()
    }


def test_the_working_tree_stays_below_its_limit(tree: dict[str, int]):
    largest = ", ".join(f"{name} {size:,}" for name, size in sorted(tree.items(), key=lambda each: -each[1])[:10])
    assert len(tree) > 100
    assert sum(tree.values()) <= LIMIT, f"the tree has {sum(tree.values()):,} bytes; the largest: {largest}"


def test_results_in_git_are_in_the_archive(tree: dict[str, int]):
    loose = [name for name in tree if name.startswith("benchmarks/results/") and not name.endswith("/archive.json.xz")]
    assert loose == [], "run `python -m benchmarks keep`"
