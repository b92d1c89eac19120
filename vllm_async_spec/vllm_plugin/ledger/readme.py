"""patches/README.md, made from the entries: one row a patch, grouped by the release whose support it dies with."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_async_spec.vllm_plugin.ledger.entries import PatchSpec, known_releases, release_order, release_runs

_INTRODUCTION = """\
# The patches

Generated from the TOML files here by `vllm-async-spec patches verify --update`; do not edit.

Each TOML says what one patch changes in vLLM, why, for which releases, and when it is deleted. `fingerprints.lock` has
the hash of every target in every release. docs/patches.md explains the ledger, and how to add a patch or a release.
"""
_HEAD = "| patch | what it changes in vLLM | releases |\n|---|---|---|\n"
_HEAD_OPEN = "| patch | what it changes in vLLM | releases | deleted when |\n|---|---|---|---|\n"


def readme(specs: Sequence[PatchSpec]) -> str:
    """The page.

    Args:
        specs: every ledger entry.
    """
    newest = known_releases(specs)[-1]
    dying = sorted({spec.releases[-1] for spec in specs if not _open(spec, newest)}, key=release_order)
    parts = [_INTRODUCTION]
    for last in dying:
        rows = [_row(specs, spec) for spec in specs if spec.releases[-1] == last and not _open(spec, newest)]
        minor = ".".join(last.split(".")[:2])
        parts.append(f"## Deleted with the support of vLLM {minor}\n\n{_HEAD}" + "".join(rows))
    rows = [_row(specs, spec, spec.remove_when) for spec in specs if _open(spec, newest)]
    parts.append(f"## Needed by the newest release, {newest}\n\n{_HEAD_OPEN}" + "".join(rows))
    return "\n".join(parts)


def _open(spec: PatchSpec, newest: str) -> bool:
    return spec.covers(newest)


def _row(specs: Sequence[PatchSpec], spec: PatchSpec, *more: str) -> str:
    cells = [f"[`{spec.name}`]({spec.name}.toml)", spec.summary, ", ".join(release_runs(specs, spec)), *more]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"
