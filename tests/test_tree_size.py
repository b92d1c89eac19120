"""The repository stays small and readable: what is generated is compressed or made on demand, and nothing is long."""

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 4_492_000
"""Bytes of all files in git. Raise it for code with tests, and for nothing that a program can make."""
ARTEFACTS, MOST_ARTEFACTS = frozenset({".xz", ".svg", ".png", ".csv", ".lock"}), 100_000
"""Files that programs make or that are data, by suffix, and their bytes; everything else is read and tested."""


@pytest.fixture(scope="module")
def tree() -> dict[str, int]:
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


def test_what_programs_make_is_a_small_part(tree: dict[str, int]):
    made = {name: size for name, size in tree.items() if Path(name).suffix in ARTEFACTS}
    assert len(made) > 3
    assert sum(made.values()) <= MOST_ARTEFACTS, f"{sum(made.values()):,} bytes: {', '.join(sorted(made))}"


def test_results_in_git_are_in_the_archive(tree: dict[str, int]):
    loose = [name for name in tree if name.startswith("benchmarks/results/") and not name.endswith("/archive.json.xz")]
    assert loose == [], "run `python -m benchmarks keep`"


def sources(tree: dict[str, int]) -> Iterator[tuple[str, str]]:
    return ((name, (ROOT / name).read_text(encoding="utf-8")) for name in tree if name.endswith(".py"))


def test_no_file_has_over_400_lines_and_no_function_over_60_a_class(tree: dict[str, int]):
    for name, text in sources(tree):
        assert text.count("\n") <= 400, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                inside = [each.name for each in ast.walk(node) if isinstance(each, ast.ClassDef)]
                assert inside == [], f"{name}: {node.name}"


def test_no_two_test_files_share_a_name(tree: dict[str, int]):
    names = Counter(Path(name).name for name in tree if re.fullmatch(r"tests/(.+/)?test_\w+\.py", name))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_documentation_has_at_most_25000_words(tree: dict[str, int]):
    """Outside of code, tables and comments."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in tree if re.fullmatch(r"docs/[\w-]+\.md", name)]
    prose = (re.sub(r"```.*?```|<!--.*?-->|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE) for text in pages)
    assert 15_000 < sum(len(text.split()) for text in prose) <= 25_000
