"""A vLLM whose source is another in some places: links to the installed one, and a few files of its own."""

import ast
from collections.abc import Iterable
from pathlib import Path


def with_another_line(source: str, qualname: str) -> str:
    node: ast.AST = ast.parse(source)
    for name in qualname.split("."):
        node = next(each for each in getattr(node, "body", []) if getattr(each, "name", None) == name)
    first = getattr(node, "body", [])[-1]
    lines = source.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}pass\n")
    return "".join(lines)


def changed_vllm(installed: Path, folder: Path, targets: Iterable[str]) -> Path:
    """Make `folder/vllm` of the `installed` package, with another line in each of `targets` (`module:qualname`)."""
    for target in targets:
        module, _, qualname = target.partition(":")
        path = Path(*module.split(".")).with_suffix(".py")
        for parent in reversed(path.parents[:-1]):
            _open_up(installed.parent / parent, folder / parent)
        source = (folder / path).read_text(encoding="utf-8")
        (folder / path).unlink()
        (folder / path).write_text(with_another_line(source, qualname), encoding="utf-8")
    return folder / "vllm"


def _open_up(original: Path, copy: Path) -> None:
    if copy.is_symlink():
        copy.unlink()
    if copy.is_dir():
        return
    copy.mkdir()
    for entry in original.iterdir():
        if entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)
