"""What MkDocs fills in while it builds, so that no page repeats by hand what the ledger or the code says.

A page asks with a comment on a line of its own:

    <!-- ledger: patches -->                      the table of the patches
    <!-- ledger: releases -->                     the releases that the ledger names, in one sentence
    <!-- reference: host_copy HostCopy Epoch --> signatures and docstrings of a module's public names
    <!-- compat: table cpu -->                    the verdicts of all runs in compat/ on one machine, by backend
    <!-- compat: advice -->                       what to use instead of each wait

For the reference, sources are parsed and not imported. `generated.py` adds the files that are made of results.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_async_spec.compat.report import Row, Run

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_async_spec"
LEDGER = ROOT / "patches"

COMPAT = ROOT / "docs" / "compat"
_REQUEST = re.compile(r"^<!-- (ledger|reference|compat): (.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every request of a page by what it asks for."""
    return _REQUEST.sub(lambda request: _ANSWERS[request[1]](*request[2].split()), markdown)


def on_serve(server: Any, **_: Any) -> Any:
    """Build again when the ledger or the code changes."""
    server.watch(str(PACKAGE))
    server.watch(str(LEDGER))
    return server


def _ledger(what: str) -> str:
    from vllm_async_spec.vllm_plugin.ledger import known_releases, load_ledger, release_runs

    specs = load_ledger(LEDGER)
    if what == "releases":
        return f"The ledger names these releases of vLLM: {', '.join(known_releases(specs))}."
    rows = ["| patch | releases | what it changes in vLLM, and why | deleted when |", "|---|---|---|---|"]
    for spec in specs:
        targets = ", ".join(f"`{target}`" for target in spec.targets if target.fingerprints)
        cells = [
            f"`{spec.name}`",
            ",<br>".join(release_runs(specs, spec)),
            f"{spec.summary}. {_words(spec.why)}<br>Target: {targets}<br>Upstream: {spec.upstream}.",
            spec.remove_when,
        ]
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def _compat(what: str, machine: str = "") -> str:
    """The runs that `vllm_async_spec.compat.publish` put there, side by side: a row for each backend; or advice."""
    if what == "advice":
        return _advice()
    from vllm_async_spec.compat.archive import read_archive

    runs = {run.name: run for run in read_archive(COMPAT)}
    if machine == "cpu":
        stems = {stem for stem in runs if stem.count("-") < 2}
    else:
        stems = {stem for stem in runs if stem.endswith(f"-{machine}")}
        stems |= {f"{release}-{way}-{machine}" for release in _ON_GPU for way in ("stock", "plugin")}
    heads = sorted(stems, key=lambda stem: (_order(stem.partition("-")[0]), "-plugin" in stem))
    found = {stem: {row.backend: row for row in runs[stem].rows} if stem in runs else {} for stem in heads}
    rows = ["| backend | " + " | ".join(head.replace("-", " ") for head in heads) + " |", "|---" * len(heads) + "|---|"]
    for name in _ranked(runs.values()):
        cells = []
        for stem in heads:
            row = found[stem].get(name)
            if row is None:
                cells.append(runs[stem].absent.get(name, "not run") if stem in runs else "not run")
            else:
                target = f"#{name.lower()}" if _has_details(row) else ""
                right = ["attention right"] if row.attention.startswith("right") else []
                said = ", ".join([row.cell, *right])
                cells.append(f"[{said}](compat/{stem}.md{target})")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _advice() -> str:
    from vllm_async_spec.audit.remedies import BY_CALL, BY_KIND

    waits = {kind.value: instead for kind, instead in BY_KIND.items()} | BY_CALL
    rows = [f"| `{wait}` | {instead} |" for wait, instead in waits.items() if wait != "warning"]
    return "\n".join(["| wait | instead |", "|---|---|", *rows])


_ON_GPU = ("0.18.1", "0.26.0", "0.32.0")
"""Releases that are to be run on a GPU: their columns are there before their runs."""


def _ranked(runs: Iterable[Run]) -> list[str]:
    """All builders of these runs, in the order of `BACKENDS`."""
    named = [[*(row.backend for row in run.rows), *run.absent] for run in runs]
    order = _backends()
    return sorted({name for names in named for name in names}, key=lambda name: order.get(name, len(order)))


def _backends() -> dict[str, int]:
    """The names of `BACKENDS`, in the order of its source."""
    text = (PACKAGE / "compat" / "backends.py").read_text(encoding="utf-8")
    return {name: at for at, name in enumerate(re.findall(r'Backend\(\s*"([A-Z0-9_]+)"', text))}


def _has_details(row: Row) -> bool:
    """Whether its page has a section on the builder."""
    parts = ("failure", "faults", "at_capture", "not_run", "notes", "not_validated", "not_attended", "unreached")
    return any(getattr(row, part) for part in parts)


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _words(text: str) -> str:
    return " ".join(text.split())


def _reference(module: str, *names: str) -> str:
    base = PACKAGE.joinpath(*module.split("."))
    path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {
        node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    if missing := [name for name in names if name not in defined]:
        raise KeyError(f"vllm_async_spec.{module} defines no {', '.join(missing)}, which reference.md names")
    parts = [_described(defined[name]) for name in names]
    return f"`vllm_async_spec.{module}`{{ .module }}\n\n" + "\n\n".join(parts)


def _described(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return _class(node)
    return f"### {node.name}\n\n{_code(_signature(node))}\n\n{_documentation(node)}"


def _class(node: ast.ClassDef) -> str:
    init = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    heading = _signature(init, node.name) if init else f"{node.name}({bases})" if bases else node.name
    parts = [f"### {node.name}", _code(f"class {heading}"), _documentation(node)]
    if fields := _fields(node):
        parts.append(_definitions(fields))
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_") or _is_setter(item):
            continue
        decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
        if "property" in decorators:
            returned = f": {ast.unparse(item.returns)}" if item.returns else ""
            code = f"@property\n{item.name}{returned}"
        else:
            kept = "".join(f"@{name}\n" for name in ("classmethod", "staticmethod") if name in decorators)
            code = kept + _signature(item)
        # The table of contents has no room for the class's name too.
        heading = f'#### {node.name}.{item.name} {{ data-toc-label="{item.name}" }}'
        parts += [heading, _code(code), _documentation(item)]
    return "\n\n".join(part for part in parts if part)


def _is_setter(node: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Attribute) and decorator.attr == "setter" for decorator in node.decorator_list)


def _fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Attributes that the class body declares, each with the string that follows it."""
    found = []
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, value = item.target.id, f": {ast.unparse(item.annotation)}"
            if item.value is not None and not _is_factory(item.value):
                value += f" = {ast.unparse(item.value)}"
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name, value = item.targets[0].id, f" = {ast.unparse(item.value)}"
        else:
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = str(after.value.value) if documented else ""  # type: ignore[union-attr]
        # A private name is shown only where it is a field that callers give.
        if not name.startswith("_") or (documented and "InitVar" in value):
            found.append((name + value, text))
    return found


def _is_factory(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "field"


def _definitions(fields: list[tuple[str, str]]) -> str:
    rows = [f"`{code}`\n:   {_words(text) or '&nbsp;'}" for code, text in fields]
    return '<div class="fields" markdown>\n\n' + "\n\n".join(rows) + "\n\n</div>"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None = None) -> str:
    """The signature without `self`, one argument a line where it is long."""
    bare = ast.FunctionDef(
        name or node.name, _without_self(node.args), [ast.Pass()], [], None if name else node.returns, lineno=0
    )
    line = ast.unparse(ast.fix_missing_locations(bare)).splitlines()[0].removeprefix("def ").removesuffix(":")
    if len(line) <= 100:
        return line
    arguments, _, returned = line.partition("(")[2].rpartition(")")
    lines = ",\n".join(f"    {argument}" for argument in _split(arguments))
    return f"{bare.name}(\n{lines},\n){returned}"


def _without_self(arguments: ast.arguments) -> ast.arguments:
    kept = copy.deepcopy(arguments)
    positional = kept.posonlyargs or kept.args
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    return kept


def _split(arguments: str) -> list[str]:
    """Cut at commas outside brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):$")


def _documentation(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A Google-style docstring as Markdown: the text, then its sections as lists."""
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
            lines += ["", f"**{section}**", ""]
        elif section and (entry := re.match(r"^ {4}(\*{0,2}\w+): (.*)$", line)) and section != "Returns":
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("    "):
            lines.append(line[2:] if section != "Returns" else line[4:])
        elif section and line.strip():
            section = ""
            lines += ["", line]
        else:
            lines.append(line)
    return "\n".join(lines).strip()


_ANSWERS: dict[str, Callable[..., str]] = {"ledger": _ledger, "reference": _reference, "compat": _compat}
