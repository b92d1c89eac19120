"""The published runs, in one compressed file: runs of a release repeat most sentences, so it is 40 times as short.

The content is JSON, a line for each builder of each run; `xz -dc docs/compat/runs.json.xz` shows it. `documents` of
`compat.publish` gives the site each run as a JSON file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vllm_async_spec.compat.json_text import packed, unpacked
from vllm_async_spec.compat.report import PublishedError, Run

ARCHIVE = "runs.json.xz"
"""Its name in `docs/compat`."""


def read_archive(folder: Path) -> list[Run]:
    """All published runs, by release, then stock first, then the simulated device first; none without the file.

    Raises:
        PublishedError: The file can't be read or holds no runs.
    """
    path = folder / ARCHIVE
    if not path.exists():
        return []
    try:
        return sorted(map(Run.read, json.loads(unpacked(path))), key=lambda run: run.order)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublishedError(f"{path} can't be read: {error}; restore it with git") from error


def write_archive(folder: Path, runs: Sequence[Run]) -> None:
    """Replace the published runs by these."""
    text = "[\n" + ",\n".join(run.to_json().rstrip("\n") for run in sorted(runs, key=lambda run: run.order)) + "\n]\n"
    (folder / ARCHIVE).write_bytes(packed(text))
