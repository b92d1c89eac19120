"""Results as git has them: an archive of a folder, and files beside it that are not in the archive yet.

Results repeat the same names and facts, so the compressed archive is nine times as short as the files. The path of a
result is that of its file also where only the archive has it; a file goes before the archive's result of its name.
`python -m benchmarks keep` puts files into the archive, and `xz -dc benchmarks/results/archive.json.xz` shows it.
"""

import copy
import fnmatch
import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from vllm_async_spec.compat.json_text import compact_json, packed, unpacked

ARCHIVE = "archive.json.xz"
_DIGITS, _COARSE_DIGITS = 4, 3
"""Two turns of an arm rarely agree in more than three."""
_AUDITS = frozenset({"audit", "audits"})
_COARSE = _AUDITS | {"measured", "tokens_per_second"}
"""Members whose floats have the smaller number of digits. Audits, passes of servers and mixed loads repeat less
exactly. Where all requests decode, arms are compared by the time of a step, and not by tokens/s."""
_UNREAD = frozenset({"overlapped", "waiting_ms"})
"""Members of audits that no table has, so the archive has none. A trace's blocks called so are drawn."""


def read_json(path: Path) -> Any:
    """The content of a result's file, or what the folder's archive has of it.

    Raises:
        OSError: neither is there, or one can't be read.
        ValueError: the file is no JSON, or the archive is damaged.
    """
    archived = _archived(path.parent)
    if path.exists() or path.suffix != ".json" or path.stem not in archived:
        return json.loads(path.read_text(encoding="utf-8"))
    return copy.deepcopy(archived[path.stem])


def exists(path: Path) -> bool:
    """Whether `read_json` finds the result."""
    return path.is_file() or (path.suffix == ".json" and path.stem in _archived(path.parent))


def files(folder: Path, pattern: str = "*.json") -> list[Path]:
    """The paths of the folder's results whose file names match the pattern, by name."""
    archived = {f"{stem}.json" for stem in _archived(folder)}
    names = archived | {path.name for path in folder.glob("*.json")}
    return [folder / name for name in sorted(names) if fnmatch.fnmatchcase(name, pattern)]


def keep(folder: Path, shorten: Callable[[Any], Any] = lambda found: found) -> list[str]:
    """Put the folder's files into its archive, and remove them; returns their names.

    Args:
        folder: holds the files, and the archive.
        shorten: what the archive gets of a result.

    Raises:
        OSError: a file can't be read or written; all files are still there.
        ValueError: a file is no JSON object, or the archive is damaged; all files are still there.
    """
    loose = sorted(folder.glob("*.json"))
    found = {path.stem: read_json(path) for path in loose}
    if wrong := [name for name, each in found.items() if not isinstance(each, dict)]:
        raise ValueError(f"{folder / wrong[0]}.json is not a JSON object, so no result; move the file")
    write_archive(folder, {**_archived(folder), **{name: shorten(each) for name, each in found.items()}})
    for path in loose:
        path.unlink()
    return list(found)


def write_archive(folder: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Make these results, by name, the folder's archive."""
    kept = {
        name: rounded(without(results[name], _UNREAD, _AUDITS), _DIGITS, _COARSE_DIGITS) for name in sorted(results)
    }
    members = (f"{json.dumps(name)}: {compact_json(each).rstrip()}" for name, each in kept.items())
    partial = folder / f"{ARCHIVE}.partial"
    partial.write_bytes(packed("{\n" + ",\n".join(members) + "\n}\n"))
    partial.replace(folder / ARCHIVE)


def rounded(value: Any, digits: int, coarse_digits: int | None = None) -> Any:
    """The same with so many digits of each float, and `coarse_digits` within the members that repeat less exactly."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        fewer = digits if coarse_digits is None else coarse_digits
        return {
            name: rounded(each, fewer if name in _COARSE else digits, coarse_digits) for name, each in value.items()
        }
    return [rounded(each, digits, coarse_digits) for each in value] if isinstance(value, list) else value


def without(value: Any, names: Collection[str], inside: Collection[str] = ()) -> Any:
    """The same without the members of these names; with `inside`, only without those within such members."""
    if isinstance(value, dict):
        return {
            name: without(each, names, () if name in inside else inside)
            for name, each in value.items()
            if inside or name not in names
        }
    return [without(each, names, inside) for each in value] if isinstance(value, list) else value


def _archived(folder: Path) -> dict[str, Any]:
    path = folder / ARCHIVE
    if not path.is_file():
        return {}
    state = path.stat()
    return _unpacked(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _unpacked(path: Path, changed: int, size: int) -> dict[str, Any]:
    """The archive's content; its time and size are asked for, so that a new one is read anew."""
    try:
        found: dict[str, Any] = json.loads(unpacked(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}; restore it with git") from error
    return found
