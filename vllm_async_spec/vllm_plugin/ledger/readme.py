"""Generates patches/README.md: one row per patch, grouped by the last release that needs the patch."""

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
    """The text of the page about every ledger entry."""
    newest = known_releases(specs)[-1]
    needed = [spec for spec in specs if spec.covers(newest)]
    dying: dict[str, list[PatchSpec]] = {}
    for spec in sorted(
        (spec for spec in specs if spec not in needed), key=lambda spec: release_order(spec.releases[-1])
    ):
        dying.setdefault(spec.releases[-1].rpartition(".")[0], []).append(spec)
    parts = [_INTRODUCTION]
    for minor, group in dying.items():
        rows = "".join(_row(specs, spec) for spec in group)
        parts.append(f"## Deleted with the support of vLLM {minor}\n\n{_HEAD}{rows}")
    rows = "".join(_row(specs, spec, spec.remove_when) for spec in needed)
    parts.append(f"## Needed by the newest release, {newest}\n\n{_HEAD_OPEN}{rows}")
    return "\n".join(parts)


def _row(specs: Sequence[PatchSpec], spec: PatchSpec, *more: str) -> str:
    cells = [f"[`{spec.name}`]({spec.name}.toml)", spec.summary, ", ".join(release_runs(specs, spec)), *more]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"
