"""JSON of results as it is committed: what the records of a list share is written once, each record is a short row.

Twenty turns have the same keys, and nearly the same facts. `as_text` writes them as

    {"each": [{"pass": "$", "arm": "$", "facts": {"vllm": "0.32.0", "graphs": "$"}}], "rows": [[0, "stock", "NONE"]]}

A `$` takes the next value of the row. If the records have several templates, a row begins with its template's number.
A dictionary of records has `named`, a row for each name, instead of `rows`. `read_json` returns the records.

`python -m benchmarks.records FILE ...` writes files anew in this form, such as those of `vllm-async-spec demo --json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["as_text", "read_json", "restored", "shortened"]

_CELL = "$"


def as_text(document: Mapping[str, Any]) -> str:
    """The document as JSON for git: a line for each member, for each element of a list, and for each row."""
    members = (f" {_dumps(name)}: {_member(value)}" for name, value in document.items())
    return "{\n" + ",\n".join(members) + "\n}\n"


def read_json(path: Path) -> Any:
    """The content of a JSON file, whether `as_text` wrote it or not.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is no JSON, or its rows do not fit their templates.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    try:
        return restored(found)
    except (LookupError, TypeError, AttributeError, RuntimeError, StopIteration) as error:
        raise ValueError(f"{path} has rows that do not fit their templates") from error


def shortened(value: Any) -> Any:
    """The same with templates and rows, wherever these are shorter.

    Raises:
        ValueError: a dictionary has the two names that only templates with their rows have.
    """
    if isinstance(value, Mapping):
        if value.keys() in _PACKED:
            raise ValueError(f"no result may have just the names {' and '.join(value)}: rename one")
        plain: Any = {name: shortened(each) for name, each in value.items()}
        records = list(value.values())
    elif isinstance(value, list):
        plain, records = [shortened(each) for each in value], value
    else:
        return value
    if len(records) < 2 or not all(isinstance(each, Mapping) for each in records):
        return plain
    templates, rows = _rows(records)
    content = {"named": dict(zip(value, rows, strict=True))} if isinstance(value, Mapping) else {"rows": rows}
    packed = {"each": templates} | content
    return packed if len(_dumps(packed)) < len(_dumps(plain)) else plain


def restored(value: Any) -> Any:
    """What `shortened` was given."""
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == _PACKED[0]:
        return [_record(value["each"], row) for row in value["rows"]]
    if value.keys() == _PACKED[1]:
        return {name: _record(value["each"], row) for name, row in value["named"].items()}
    return {name: restored(each) for name, each in value.items()}


_PACKED = ({"each", "rows"}, {"each", "named"})


def _rows(records: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[list[Any]]]:
    """The templates, in the order of their first records, and a row for each record."""
    shapes = [_shape(record) for record in records]
    groups: dict[Any, list[list[Any]]] = {shape: [] for shape in shapes}
    for shape, record in zip(shapes, records, strict=True):
        groups[shape].append(list(_leaves(record)))
    shared = {shape: [_shared(values) for values in zip(*group, strict=True)] for shape, group in groups.items()}
    templates = []
    for shape, same in shared.items():
        leaves = iter([first if one else _CELL for one, first in zip(same, groups[shape][0], strict=True)])
        templates.append(_filled(records[shapes.index(shape)], leaves))
    number = {shape: [place] if len(groups) > 1 else [] for place, shape in enumerate(groups)}
    rows = []
    for shape, record in zip(shapes, records, strict=True):
        own = [leaf for one, leaf in zip(shared[shape], _leaves(record), strict=True) if not one]
        rows.append(number[shape] + own)
    return templates, rows


def _record(templates: list[Any], row: list[Any]) -> Any:
    values = iter(row)
    template = templates[next(values) if len(templates) > 1 else 0]
    record = _filled(template, (next(values) if leaf == _CELL else leaf for leaf in _leaves(template)))
    if list(values):
        raise LookupError("the row is too long")
    return record


def _shared(values: Sequence[Any]) -> bool:
    # 1 and 1.0 and True are equal, and written differently.
    return values[0] != _CELL and len({_dumps(value) for value in values}) == 1


def _shape(value: Any) -> Any:
    """The names in a value at all depths; two records of one shape differ in their leaves only."""
    if isinstance(value, Mapping):
        return tuple((name, _shape(each)) for name, each in value.items())
    return tuple(map(_shape, value)) if _holds_records(value) else None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) or _holds_records(value):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value


def _filled(value: Any, leaves: Iterator[Any]) -> Any:
    """The same names and lists with other leaves."""
    if isinstance(value, Mapping):
        return {name: _filled(each, leaves) for name, each in value.items()}
    return [_filled(each, leaves) for each in value] if _holds_records(value) else next(leaves)


def _holds_records(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


def _member(value: Any) -> str:
    short = shortened(value)
    if isinstance(short, list) and short:
        return "[\n  " + ",\n  ".join(map(_dumps, short)) + "\n ]"
    if isinstance(short, dict) and short.keys() == _PACKED[0]:
        rows = ",\n  ".join(map(_dumps, short["rows"]))
        return f'{{"each":{_dumps(short["each"])},"rows":[\n  {rows}\n ]}}'
    return _dumps(short)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        try:
            file.write_text(as_text(read_json(file)), encoding="utf-8")
        except (OSError, ValueError, AttributeError) as error:
            sys.exit(f"{file} can't be written anew: {error}; name a file with a JSON object")
