"""Put results of the suite into the documentation.

`python -m vllm_async_spec.compat.publish RESULT.json ...` reads what `vllm-async-spec compat --json` wrote, and saves
the published part in `docs/compat/runs.json.xz`, in place of an earlier run of the same name. The site's build makes a
page and a JSON file of each run, an overview page and a badge. A file that is named `plugin` but holds a stock result,
or the reverse, is refused. So a run that lacked `--plugin` by mistake never becomes stock's column.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_async_spec.compat.archive import read_archive, write_archive
from vllm_async_spec.compat.render import badge, markdown, render_html
from vllm_async_spec.compat.report import PublishedError, Run, read_runs

WANTED = tuple((release, way, "h200") for release in ("0.18.1", "0.26.0", "0.32.0") for way in ("stock", "plugin"))
"""Runs that have a column in the table even if they are missing: release, way, machine."""

_BADGE_OF = "0.32.0-plugin"


def documents(runs: Sequence[Run]) -> dict[str, str]:
    """The site's files for these runs: contents by path in the site's sources."""
    files = {f"compat/{run.name}.md": markdown(run) for run in runs}
    files |= {f"compat/{run.name}.json": run.to_json() for run in runs}
    files["assets/compatibility.html"] = render_html(runs, WANTED)
    return files | {f"assets/{run.name}.svg": badge(run) for run in runs if run.name == _BADGE_OF}


def _taken(paths: Sequence[Path]) -> dict[str, Run]:
    """The runs in these files by name.

    Raises:
        PublishedError: A file can't be read, contradicts its name, or holds the same run as another.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        (run,) = read_runs([path])
        said = {"stock", "plugin"} & set(re.split(r"\W+", path.stem))
        if len(said) == 1 and run.way not in said:
            made = "without" if run.way == "stock" else "with"
            raise PublishedError(
                f"{path} was made {made} --plugin, so it is {run.name}; rename the file or run the suite again"
            )
        if run.name in runs:
            raise PublishedError(f"{path} is {run.name}, and so is an earlier file; give only one of the two")
        runs[run.name] = run
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish from the command line; returns 2 if a file is refused or the documentation has no `compat/`."""
    parser = argparse.ArgumentParser(description="Copy results of the compatibility suite into the documentation.")
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT", help="file that `vllm-async-spec compat --json` wrote"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="the documentation's directory")
    options = parser.parse_args(arguments)
    if not (options.docs / "compat").is_dir():
        print(
            f"publish: {options.docs} has no compat/; name the documentation's directory with --docs", file=sys.stderr
        )
        return 2
    try:
        runs = _taken(options.results)
        published = {run.name: run for run in read_archive(options.docs / "compat")}
    except PublishedError as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    write_archive(options.docs / "compat", list((published | runs).values()))
    print(f"{len(runs)} runs written to {options.docs / 'compat'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
