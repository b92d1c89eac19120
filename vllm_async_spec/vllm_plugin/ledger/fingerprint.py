"""Hashes the source of a function or class without its layout, comments and docstrings."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def fingerprints(source: str, qualnames: Iterable[str]) -> dict[str, str]:
    """The fingerprints of classes and functions in a module's source, by dotted name: 8 hexadecimal digits each.

    They are the same under every supported Python: newer ones only add fields that are empty, and empty fields are
    skipped. Names that the module does not define are left out.
    """
    tree = ast.parse(source)
    nodes = {qualname: _definition(tree, qualname) for qualname in qualnames}
    return {
        qualname: hashlib.sha256(_canonical(node).encode()).hexdigest()[:8]
        for qualname, node in nodes.items()
        if node is not None
    }


def module_file(root: Path, module: str) -> Path | None:
    """The file of `module` under `root`, the directory that contains the top package; None if there is none."""
    base = root.joinpath(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _definition(tree: ast.Module, qualname: str) -> ast.AST | None:
    node: ast.AST | None = tree
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for name in qualname.split("."):
        children = (child for child in getattr(node, "body", []) if isinstance(child, kinds))
        node = next((child for child in children if child.name == name), None)
    return node


def _canonical(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_canonical(item) for item in _without_docstring(node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # Skip `kind`, which tells u"" from "". Empty fields are skipped, so Python 3.12's `type_params` changes nothing.
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind"]
    return f"{type(node).__name__}({','.join(f'{name}={_canonical(value)}' for name, value in fields)})"


def _without_docstring(body: list[object]) -> list[object]:
    """The statements without those that are only a string, which are documentation wherever they stand."""
    return [
        item
        for item in body
        if not (
            isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
        )
    ]
