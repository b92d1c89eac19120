"""Which expressions of a function are tensors in host memory, by vLLM's naming and by the function's assignments.

A read of a host tensor waits for nothing, so only reads of other values matter. vLLM names host tensors `..._cpu` and
`..._np`. A local variable is judged by what the function assigns to it, never by its name: a copy that nobody waited
for may have such a name too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_ON_HOST = ("_cpu", "_np")
_PARTS = ("T", "mT", "data", "values", "indices")
"""Attributes of a tensor, or of an operator's result, that are where the tensor is."""
_REDUCTIONS = ("max", "min", "sum", "item")


class HostValues:
    """Judges expressions of one function; without its definition, of code outside of functions."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> None:
        self._assigned: dict[str, list[ast.expr | None]] = {}
        for name, value in _assignments(function) if function is not None else ():
            self._assigned.setdefault(name, []).append(value)
        self._asked: set[str] = set()

    def holds(self, node: ast.expr | None) -> bool:
        """Whether `node` is surely in host memory; False if that can't be told, as without a node."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return _is_named(node.attr) or (node.attr in _PARTS and self.holds(node.value))
        if isinstance(node, ast.Subscript | ast.NamedExpr | ast.Starred):
            return self.holds(node.value)
        if isinstance(node, ast.UnaryOp):
            return self.holds(node.operand)
        if isinstance(node, ast.BinOp | ast.Compare):
            operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.left, *node.comparators]
            # PyTorch refuses operands on two sides, except one element.
            return any(self.holds(each) for each in operands if not _is_element(each))
        if isinstance(node, ast.IfExp):
            return all(_is_none(each) or self.holds(each) for each in (node.body, node.orelse))
        return isinstance(node, ast.Call) and self._call(node)

    def _name(self, name: str) -> bool:
        if name not in self._assigned:
            return _is_named(name)
        if name in self._asked:
            return True  # assigned from itself, so the other assignments decide
        self._asked.add(name)
        try:
            # Nobody reads a value from None.
            return all(self.holds(value) for value in self._assigned[name] if not _is_none(value))
        finally:
            self._asked.discard(name)

    def _call(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute):
            return False
        owner, name = text(call.func.value), call.func.attr
        if owner in ("np", "numpy") or name in ("cpu", "numpy", "tolist", "item"):
            return True
        place = next((text(each.value) for each in call.keywords if each.arg == "device"), None)
        if owner.partition(".")[0] == "torch":
            return place in _HOST if place is not None else any(self.holds(each) for each in call.args)
        if name == "to" and not all(text(each).startswith("torch.") for each in call.args):
            return text(call.args[0]) in _HOST and not any(each.arg == "non_blocking" for each in call.keywords)
        return place in (None, *_HOST) and name != "cuda" and self.holds(call.func.value)


_HOST = ("'cpu'", "torch.device('cpu')")


def text(node: ast.AST) -> str:
    """The source of an expression, in Python's own layout."""
    return ast.unparse(node)


def _assignments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a function binds, each with the value; None for a value that can't be told."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _bound(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from _bound(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield from _bound(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield from _bound(node.optional_vars, None)


def _bound(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        values: list[ast.expr | None] = [None] * len(target.elts)
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            values = list(value.elts)
        for each, one in zip(target.elts, values, strict=True):
            yield from _bound(each, one)
    elif isinstance(target, ast.Starred):
        yield from _bound(target.value, None)


def _is_named(name: str) -> bool:
    return name.endswith(_ON_HOST) or name in ("cpu", "np", "seq_lens_cpu_upper_bound")


def _is_element(node: ast.expr) -> bool:
    """Whether a tensor of this form has one element, which may be on the other side than its partner."""
    if isinstance(node, ast.Subscript):
        return not any(isinstance(each, ast.Slice) for each in ast.walk(node.slice))
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REDUCTIONS


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
