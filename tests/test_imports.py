"""What importing costs, and that imports point downwards only (the layout of the package)."""

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_async_spec"

# Lowest first: a part may import parts of lower rows, and its own row's only where it is the same part.
LAYERS = [
    {
        "_version",
        "sync_policy",
        "host_copy",
        "known_on_host",
        "host_lengths",
        "metadata",
        "streams",
        "patching",
        "process_group",
        "engine_log",
        "json_child",
    },
    {"kernels"},
    {"attention", "spec_decode"},
    {"audit"},
    {"compat", "generation", "vllm_plugin"},
    {"demo"},
    {"cli"},
    {"command"},
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
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


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


def test_each_part_has_a_row_in_the_layout():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [part for part in RANK.keys() - {"_version"} if not re.search(rf"^\| `{part}(\.py|/)` \|", text, re.M)] == []


def test_no_module_imports_itself_by_way_of_others():
    """Inside functions neither: an import that must wait for another hides a circle."""
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    # A package beside one of its own modules is where the name was found, not another step.
    graph = {
        module: {name for name in imports(path) & files.keys() if name != module and not is_only_the_way(name, path)}
        for module, path in files.items()
    }
    assert not circle(graph)


def is_only_the_way(name: str, path: Path) -> bool:
    """Whether all that `path` imports from the package `name` are modules of it."""
    named = {other.removeprefix(f"{name}.") for other in imports(path) if other.startswith(f"{name}.")}
    package = PACKAGE.parent.joinpath(*name.split("."))
    direct = {each for each in named if "." not in each}
    return bool(direct) and all((package / f"{each}.py").exists() or (package / each).is_dir() for each in direct)


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) in (list("abca"), list("bcab"), list("cabc"))
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_rule_sees_an_upward_import(tmp_path: Path):
    path = tmp_path / "bad.py"
    path.write_text("from vllm_async_spec.cli import main\nimport vllm.config\n")
    assert imports(path) == {"vllm_async_spec.cli", "vllm_async_spec.cli.main", "vllm.config"}
    assert RANK["cli"] > RANK["metadata"]


def printed(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_package_imports_pytorch_only():
    code = """
import json, sys, torch
before = set(sys.modules)
import vllm_async_spec, vllm_async_spec.attention, vllm_async_spec.vllm_plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(json.dumps([sorted(new), torch.cuda.is_initialized()]))
"""
    assert printed(code) == [["vllm_async_spec"], False]


def test_importing_the_package_imports_not_even_pytorch():
    code = """
import json, sys
before = set(sys.modules)
import vllm_async_spec, vllm_async_spec.cli
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = sorted(new & {"torch", "numpy", "vllm", "prometheus_client"})
print(json.dumps([heavy, "Epoch" in dir(vllm_async_spec)]))
"""
    assert printed(code) == [[], True]


@pytest.mark.parametrize("module", ["vllm_async_spec", "vllm_async_spec.sync_policy"])
def test_public_names_are_the_same_whatever_was_imported_first(module: str):
    code = f"""
import {module}, vllm_async_spec
from vllm_async_spec import *
import vllm_async_spec.host_copy, vllm_async_spec.metadata, sys
there = {{name: getattr(vllm_async_spec, name) for name in vllm_async_spec.__all__}}
assert all(globals()[name] is value for name, value in there.items())
assert sync_policy is sys.modules["vllm_async_spec.sync_policy"].sync_policy
assert not hasattr(vllm_async_spec, "no_such_name")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
