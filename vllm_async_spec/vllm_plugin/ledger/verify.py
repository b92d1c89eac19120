"""Comparing the ledger with the source of some vLLM that is neither imported nor installed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_async_spec.vllm_plugin.ledger.entries import PatchError, PatchSpec, missing
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprint, module_file


class Match(str, enum.Enum):
    """What `verify` says of a patch and some vLLM source."""

    SAME = "same"
    """Its targets are as in a release that the patch is for."""
    CHANGED = "changed"
    """The patch is for this release, or the release is unknown, and a target is as in none that it is for."""
    OTHER = "not for this release"
    """The ledger knows the release and has the patch for others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` says of one patch."""

    patch: str
    match: Match
    fingerprints: dict[str, str]
    """Target to its fingerprint, for those that the source defines."""
    release: str | None
    """The newest release that the patch is for and that has the target so."""


def source_release(source: Path) -> str | None:
    """The release that an unpacked wheel says it is, without its local part; None where it says nothing."""
    names = [path.name for path in source.glob("vllm*.dist-info")]
    return names[0].removesuffix(".dist-info").rpartition("-")[2].partition("+")[0] if len(names) == 1 else None


def verify(specs: Sequence[PatchSpec], source: Path) -> list[Verdict]:
    """Compare every target with the source of some vLLM.

    Args:
        specs: the ledger entries.
        source: the directory that contains `vllm/`.

    Raises:
        PatchError: there is no vLLM in `source`.
    """
    if module_file(source, "vllm") is None:
        raise PatchError(f"{source} contains no vllm/; name the directory that a vLLM wheel was unpacked into")
    release = source_release(source)
    known = any(release in spec.releases for spec in specs)
    return [compare(spec, source, release if known else None) for spec in specs]


def compare(spec: PatchSpec, source: Path, release: str | None) -> Verdict:
    """Compare the targets of one patch.

    Args:
        spec: the ledger entry.
        source: the directory that contains `vllm/`.
        release: which one that is, if the ledger knows it.
    """
    found: dict[str, str] = {}
    matched: str | None = None
    same = True
    for target in spec.targets:
        path = module_file(source, target.module)
        code = None if path is None else fingerprint(path.read_text(encoding="utf-8"), target.qualname)
        if code is not None:
            found[str(target)] = code
            as_in = target.release_with(code)
            matched, same = as_in or matched, same and as_in is not None
    if release is not None and release not in spec.releases:
        return Verdict(spec.name, Match.OTHER, found, None)
    same = same and bool(found) and not missing(spec.targets, found)
    return Verdict(spec.name, Match.SAME if same else Match.CHANGED, found, matched)
