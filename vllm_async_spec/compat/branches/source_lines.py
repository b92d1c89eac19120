"""The functions of a Python file: their statements, branches, and expressions that could wait."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_async_spec.compat.branches.could_wait import Suspect, suspects
from vllm_async_spec.compat.branches.host_values import HostValues


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement, from its first line to its last; of a compound statement only the part before its body.

    Attributes:
        suspects: Its expressions that could wait.
        calls: Its calls.
    """

    first: int
    last: int
    suspects: tuple[Suspect, ...] = ()
    calls: tuple[ast.Call, ...] = ()

    def ran(self, lines: Collection[int]) -> bool:
        """Whether one of its lines is among the executed `lines`."""
        return any(line in lines for line in range(self.first, self.last + 1))


@dataclass(frozen=True, slots=True)
class Branch:
    """One of the ways on from a condition, a loop or a match.

    Attributes:
        source: Lines of the condition.
        body: Lines that the branch leads to, or if `leaves`, that it does not lead to.
        leaves: Whether it leads past the body.
    """

    source: range
    body: range
    leaves: bool

    def taken(self, ways: Mapping[int, Collection[int]]) -> bool:
        """Whether this branch ran, by the lines that each executed line led to; a negative line leaves the function."""
        ends = (end for line in self.source for end in ways.get(line, ()))
        return any(
            (end not in self.source if self.leaves else True) and (end in self.body) != self.leaves for end in ends
        )


@dataclass(slots=True)
class Function:
    """A function or method, without the functions defined in it.

    Attributes:
        name: Its qualified name in the module, such as `Builder.build`; `<locals>` is left out.
        first: The line of `def`, or of the first decorator, as in `code.co_firstlineno`.
        outer: The function that it is defined in; None if there is none.
        statements: Its statements in the order of lines, without its docstring.
        branches: Its branches.
        imports: Names that it imports, each with module and name.
    """

    name: str
    first: int
    outer: Function | None
    statements: list[Statement] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def ran(self, lines: Collection[int]) -> bool:
        """Whether a statement of it ran."""
        return any(statement.ran(lines) for statement in self.statements)


@functools.cache
def functions_of(file: str) -> tuple[Function, ...]:
    """The functions of a Python file, outer ones first; none if the file can't be read or is not Python."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(_functions(tree.body, "", None))


_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(body: list[ast.stmt], prefix: str, outer: Function | None) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.", outer)
        elif isinstance(node, _Definition):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            function = Function(prefix + node.name, first, outer)
            inner: list[ast.stmt] = []
            has_docstring = ast.get_docstring(node, clean=False) is not None
            _read(node.body[has_docstring:], function, inner, HostValues(node), None)
            yield function
            yield from _functions(inner, f"{function.name}.", function)
        else:
            yield from _functions([each for block in _blocks(node) for each in block], prefix, outer)


def _read(
    body: list[ast.stmt],
    function: Function,
    inner: list[ast.stmt],
    values: HostValues,
    guard: tuple[int, int] | None,
) -> None:
    """Note the statements and branches of `body`, and put the functions and classes defined there into `inner`.

    `guard` has the lines of the condition before `body`.
    """
    for node in body:
        if isinstance(node, _Definition | ast.ClassDef):
            inner.append(node)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            _note_imports(node, function)
        blocks = _blocks(node)
        own = [each for each in ast.iter_child_nodes(node) if not isinstance(each, _WITH_BODY)] if blocks else [node]
        first, last = node.lineno, node.end_lineno or node.lineno
        if blocks:
            last = max(first, min(each.lineno for block in blocks for each in block) - 1)
        if not isinstance(node, ast.Try | ast.Global | ast.Nonlocal):
            found = tuple(suspect for each in own for suspect in suspects(each, values, guard))
            calls = tuple(each for part in own for each in ast.walk(part) if isinstance(each, ast.Call))
            function.statements.append(Statement(first, last, found, () if isinstance(node, ast.Raise) else calls))
        function.branches += _branches(node, range(first, last + 1))
        for block in blocks:
            _read(block, function, inner, values, (first, last))


_WITH_BODY = ast.stmt | ast.ExceptHandler | ast.match_case


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements in a statement, in the order of lines."""
    blocks = [getattr(node, "body", [])]
    blocks += [each.body for each in (*getattr(node, "handlers", []), *getattr(node, "cases", []))]
    blocks += [getattr(node, "orelse", []), getattr(node, "finalbody", [])]
    return [block for block in blocks if block]


def _branches(node: ast.stmt, source: range) -> Iterator[Branch]:
    if isinstance(node, ast.Match):
        for case in node.cases:
            yield Branch(range(node.lineno, case.body[0].lineno), _span(case.body), leaves=False)
    elif isinstance(node, ast.If | ast.While | ast.For | ast.AsyncFor):
        body = _span(node.body)
        if body.start in source or (not isinstance(node, ast.For | ast.AsyncFor) and _is_constant(node.test)):
            return  # a body on the condition's line can't be told from the condition
        yield Branch(source, body, leaves=False)
        yield Branch(source, body, leaves=True)


def _is_constant(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) or ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _span(block: list[ast.stmt]) -> range:
    return range(block[0].lineno, (block[-1].end_lineno or block[-1].lineno) + 1)


def _note_imports(node: ast.Import | ast.ImportFrom, function: Function) -> None:
    for alias in node.names:
        name = alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom):
            function.imports[name] = (node.module or "", alias.name)
        else:
            function.imports[name] = (alias.name if alias.asname else name, None)
