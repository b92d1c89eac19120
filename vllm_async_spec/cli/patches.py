"""`vllm-async-spec patches`: lists the ledger, and compares it with a vLLM source tree."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_async_spec.cli.common import AsJson, fail, refuse
from vllm_async_spec.compat.fetch import LATEST, FetchError, fetch_release
from vllm_async_spec.vllm_plugin.ledger.entries import (
    LOCK,
    PatchError,
    PatchSpec,
    ledger_directory,
    load_ledger,
    lock_text,
    read_lock,
    release_runs,
)
from vllm_async_spec.vllm_plugin.ledger.readme import readme
from vllm_async_spec.vllm_plugin.ledger.release_summary import release_summary
from vllm_async_spec.vllm_plugin.ledger.verify import Match, Verdict, source_release, updated_lock, verify

patches_app = typer.Typer(help="The patch ledger.", no_args_is_help=True)

_STYLE = {Match.SAME: "green", Match.CHANGED: "bold red", Match.NOT_NEEDED: "dim"}


@patches_app.command("list")
def list_patches(as_json: AsJson = False) -> None:
    """What each patch is for: why it exists, for which releases, and when it is deleted."""
    specs = load_ledger()
    if as_json:
        rows = [
            {
                "name": s.name,
                "summary": s.summary,
                "why": s.why.strip(),
                "upstream": s.upstream,
                "remove_when": s.remove_when,
                "releases": s.releases,
                "targets": [str(t) for t in s.targets],
            }
            for s in specs
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = _table("patch", "releases", "what it changes in vLLM", "deleted when")
    for spec in specs:
        table.add_row(spec.name, ", ".join(release_runs(specs, spec)), spec.summary, spec.remove_when)
    Console().print(table)


@patches_app.command("verify")
def verify_patches(
    vllm_source: Annotated[
        Path | None, typer.Option(help="The directory that contains vllm/, such as an unpacked wheel.")
    ] = None,
    pip: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Download this release instead, or latest, and print a summary."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the download's Python there; default: keep nothing.")
    ] = None,
    as_json: AsJson = False,
    update: Annotated[
        bool, typer.Option("--update", help="Then write this release's fingerprints into the lock file.")
    ] = False,
) -> None:
    """Compare every patch's target with some vLLM's source, which is neither imported nor installed.

    Exit code 0: every patch that is for this release finds its target as it knows it; 1: one does not, and would be
    refused; 2: there is no such source, pip can't get the release, or the command line has a mistake. With --update it
    is 0 once the lock file and the README beside it are written.
    """
    if (vllm_source is None) is (pip is None):
        refuse("give one of --vllm-source DIR and --pip VERSION, such as --pip latest")
    if cache is not None and pip is None:
        refuse("--cache keeps what --pip downloads; leave out --cache, or give --pip VERSION")
    with contextlib.ExitStack() as scratch:
        source = vllm_source or _downloaded(pip or LATEST, cache, scratch)
        try:
            specs = load_ledger()
            verdicts = verify(specs, source)
            release = source_release(source)
            if pip is not None and not as_json:
                typer.echo("\n".join(release_summary(specs, verdicts, release)))
            else:
                _print(verdicts, release, as_json)
            if update:
                _update(specs, source, [verdict for verdict in verdicts if verdict.match is Match.CHANGED])
        except PatchError as error:
            fail(str(error), 2)
    raise typer.Exit(1 if not update and any(v.match is Match.CHANGED for v in verdicts) else 0)


def _downloaded(version: str, cache: Path | None, scratch: contextlib.ExitStack) -> Path:
    """The release's unpacked Python: in `cache`, or until `scratch` ends in a temporary directory."""
    try:
        return fetch_release(version, cache or Path(scratch.enter_context(tempfile.TemporaryDirectory())))
    except FetchError as error:
        fail(f"--pip {version}: {error}", 2)
    except OSError as error:
        where = cache or "a temporary directory"  # which may be what is missing
        fail(f"--pip {version}: its Python can't be kept in {where}: {error}; give --cache DIR that can be written", 2)


def _print(verdicts: list[Verdict], release: str | None, as_json: bool) -> None:
    if as_json:
        rows = [
            {"patch": v.patch, "match": v.match.value, "fingerprints": v.fingerprints, "as_in": v.release}
            for v in verdicts
        ]
        typer.echo(json.dumps({"release": release, "patches": rows}, indent=2))
        return
    title = f"vLLM {release or 'of an unknown release'}"
    table = _table("patch", "verdict", "as in", "fingerprint", title=title)
    for v in verdicts:
        codes = "" if v.match is Match.NOT_NEEDED else ", ".join(v.fingerprints.values()) or "absent"
        table.add_row(v.patch, f"[{_STYLE[v.match]}]{v.match.value}[/]", v.release or "", codes)
    Console().print(table)


def _table(*names: str, title: str | None = None) -> Table:
    """A table with these columns that cuts nothing off, and breaks no patch's name."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name == "patch")
    return table


def _update(specs: Sequence[PatchSpec], source: Path, changed: list[Verdict]) -> None:
    """Write the lock file, then the README.

    Raises:
        PatchError: the source has no release, or the ledger's directory can't be written to.
    """
    directory = ledger_directory()
    lock = updated_lock(specs, read_lock(directory), source)
    try:
        _write(directory / LOCK, lock_text(lock))
        _write(directory / "README.md", readme(load_ledger(directory)))
    except OSError as error:
        raise PatchError(f"{directory} can't be written to: {error}") from error
    typer.echo(f"Wrote the fingerprints of vLLM {source_release(source)} into {directory / LOCK}.", err=True)
    if changed:
        names = ", ".join(verdict.patch for verdict in changed)
        typer.echo(f"Before you commit them, read what vLLM changed in the targets of {names}.", err=True)


def _write(path: Path, text: str) -> None:
    """Replace a file atomically, so that no reader finds half a file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
