"""What importing costs, and that imports point downwards only (the layout of the package)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_async_spec"

# Lowest first: a part may import parts of lower rows, and its own row's only where it is the same part.
LAYERS = [
    {"_version", "sync_policy", "host_copy", "host_lengths", "metadata"},
    {"kernels"},
    {"attention", "spec_decode"},
    {"audit"},
    {"compat", "generation", "vllm_plugin"},
    {"demo"},
    {"cli"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
VLLM_PARTS = {"vllm_plugin", "audit", "compat", "demo"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path):
    part = part_of(path)
    assert part in RANK, f"{part} is not in the layout"
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "vllm_async_spec" and rest and rest[0] in RANK and rest[0] != part:
            core = RANK[part] == RANK[rest[0]] == 0
            assert RANK[rest[0]] < RANK[part] or core, f"{part} imports {name}"
        if top == "vllm":
            assert part in VLLM_PARTS, f"{part} imports vllm"
        if top == "transformers":
            assert part == "generation", f"{part} imports transformers"


def test_the_rule_sees_an_upward_import(tmp_path: Path):
    path = tmp_path / "bad.py"
    path.write_text("from vllm_async_spec.cli import main\nimport vllm.config\n")
    assert imports(path) == {"vllm_async_spec.cli", "vllm.config"}
    assert RANK["cli"] > RANK["metadata"]


def test_importing_the_package_imports_pytorch_only():
    code = """
import json, sys, torch
before = set(sys.modules)
import vllm_async_spec, vllm_async_spec.attention, vllm_async_spec.vllm_plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(json.dumps([sorted(new), torch.cuda.is_initialized()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["vllm_async_spec"], False]
