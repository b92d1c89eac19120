"""Expressions of Python source that could make the host wait for the device, found without running them.

The search knows names, not types. A read of a value that `host_values` can't place counts as one that could wait. The
search can't report `int(x)`, `if x:`, a boolean index, `.to(place)` or `a.copy_(b)` of device tensors: no name tells
these from their harmless forms. Only a `copy_` into a name of the host's is reported.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_async_spec.audit.report import WaitKind
from vllm_async_spec.compat.branches.host_values import HostValues, text

HOST_LENGTHS = ("seq_lens_cpu", "_seq_lens_cpu", "num_computed_tokens_cpu", "_num_computed_tokens_cpu")
"""Fields of the common metadata that hold exact lengths on the host, and properties that copy them."""

_LENGTH = 100
"""Most characters of an expression's text."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """An expression that could wait, from line `first` to line `last`.

    Attributes:
        name: The function or field, such as `item`, in `line`.
        what: How it could wait: `read (item)`, `copy to host (cpu)`, `read of a host length (seq_lens_cpu)`.
        source: Its text, on one line.
        guarded: Whether a condition on the same line decides whether it runs, so that lines can't tell.
    """

    name: str
    what: str
    source: str
    line: int
    first: int
    last: int
    guarded: bool


def suspects(node: ast.AST, values: HostValues, guard: tuple[int, int] | None = None) -> Iterator[Suspect]:
    """The expressions in `node` that could wait, outer ones first, except in a `raise`, which ends the step.

    Args:
        node: An expression, or a statement without a body.
        values: Judges the values of the function that `node` is in.
        guard: First and last line of the condition that decides whether `node` runs.
    """
    yield from _walk(node, values, guard)


def _walk(node: ast.AST, values: HostValues, guard: tuple[int, int] | None) -> Iterator[Suspect]:
    """`guard` has the first and last line of the innermost condition that decides whether `node` runs."""
    if isinstance(node, ast.Raise):
        return
    if (found := _name_and_kind(node, values)) is not None and isinstance(node, ast.expr):
        first, last = _lines(node)
        guarded = guard is not None and guard[0] <= last and first <= guard[1]
        named = node.func if isinstance(node, ast.Call) else node
        shown = textwrap.shorten(text(node), _LENGTH, placeholder="...")
        yield Suspect(*found, shown, named.end_lineno or last, first, last, guarded)
    for child, own in _guards(node):
        yield from _walk(child, values, own or guard)


def _guards(node: ast.AST) -> Iterator[tuple[ast.AST, tuple[int, int] | None]]:
    """The children of `node`, each with the lines of the condition that `node` puts before the child, if any."""
    if isinstance(node, ast.IfExp):
        yield from ((node.test, None), (node.body, _lines(node.test)), (node.orelse, _lines(node.test)))
    elif isinstance(node, ast.BoolOp):
        yield node.values[0], None
        yield from ((value, _lines(before)) for before, value in zip(node.values, node.values[1:], strict=False))
    elif isinstance(node, ast.Lambda):
        yield node.body, _lines(node)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        first, *others = node.generators
        yield first.iter, None  # runs even if there is nothing to iterate over
        inner = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        yield from ((each, _lines(first.iter)) for each in (*inner, *first.ifs, *others))
    else:
        yield from ((child, None) for child in ast.iter_child_nodes(node))


def _lines(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _name_and_kind(node: ast.AST, values: HostValues) -> tuple[str, str] | None:
    if isinstance(node, ast.Attribute):
        is_read = node.attr in HOST_LENGTHS and isinstance(node.ctx, ast.Load)
        return (node.attr, f"read of a host length ({node.attr})") if is_read else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name, owner = node.func.attr, node.func.value
    read = node.args[0] if text(owner) == "torch" and node.args else owner
    if text(owner) in ("np", "numpy") or (name in _READS and values.holds(read)):
        return None
    find = _CALLS.get(name)
    kind = None if find is None else find(node)
    return None if kind is None else (name, f"{kind.value} ({name})")


def _always(kind: WaitKind) -> Callable[[ast.Call], WaitKind | None]:
    return lambda call: kind


def _synchronize(call: ast.Call) -> WaitKind | None:
    owner = text(call.func)
    if owner.startswith(("torch.", "current_platform.")):
        return WaitKind.DEVICE
    return WaitKind.EVENT if "event" in owner.lower() else WaitKind.STREAM


def _to(call: ast.Call) -> WaitKind | None:
    """Only a copy to `"cpu"` or `torch.device("cpu")`: any other device is a variable."""
    named = [*call.args, *(each.value for each in call.keywords if each.arg == "device")]
    to_host = any(text(each) in ("'cpu'", "torch.device('cpu')") for each in named)
    return WaitKind.COPY_TO_HOST if to_host and not _is_non_blocking(call) else None


def _copy(call: ast.Call) -> WaitKind | None:
    """A blocking copy into a variable or attribute that is named as the host's."""
    assert isinstance(call.func, ast.Attribute)
    if any(isinstance(each, ast.Call) for each in ast.walk(call.func)):
        return None  # into a new buffer, such as a pinned one on the way to the device
    is_blocking = not _is_non_blocking(call) and not any(text(each) == "True" for each in call.args[1:])
    into_host = any(word in text(call.func) for word in ("_cpu", "host", "pinned"))
    return WaitKind.COPY_TO_HOST if into_host and is_blocking else None


def _upload(call: ast.Call) -> WaitKind | None:
    """`torch.tensor(list, device=...)`, which copies from memory that is not pinned."""
    places = [text(each.value) for each in call.keywords if each.arg == "device"]
    is_upload = any(place not in ("'cpu'", "torch.device('cpu')", "None") for place in places)
    return WaitKind.COPY_TO_DEVICE if is_upload and text(call.func).startswith("torch.") else None


def _where(call: ast.Call) -> WaitKind | None:
    return WaitKind.READ if len(call.args) == 1 and not call.keywords else None


def _repeat(call: ast.Call) -> WaitKind | None:
    return None if any(each.arg == "output_size" for each in call.keywords) else WaitKind.READ


def _is_non_blocking(call: ast.Call) -> bool:
    return any(each.arg == "non_blocking" and text(each.value) == "True" for each in call.keywords)


_CALLS: dict[str, Callable[[ast.Call], WaitKind | None]] = {
    "cpu": _always(WaitKind.COPY_TO_HOST),
    "to": _to,
    "copy_": _copy,
    "item": _always(WaitKind.READ),
    "tolist": _always(WaitKind.READ),
    "numpy": _always(WaitKind.READ),
    "nonzero": _always(WaitKind.READ),
    "argwhere": _always(WaitKind.READ),
    "unique": _always(WaitKind.READ),
    "bincount": _always(WaitKind.READ),
    "masked_select": _always(WaitKind.READ),
    "where": _where,
    "repeat_interleave": _repeat,
    "synchronize": _synchronize,
    "tensor": _upload,
    "as_tensor": _upload,
}
"""Calls that could wait, by the function's name, as `audit.host_reads` and `compat.simulated_device` see them."""

_READS = frozenset(_CALLS) - {"copy_", "synchronize", "tensor", "as_tensor"}
"""Calls that wait only for the value that they read."""

COULD_WAIT = frozenset(_CALLS)
"""The names of functions that could wait."""
