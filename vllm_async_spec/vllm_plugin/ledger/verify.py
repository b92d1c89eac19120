"""Compares the ledger with a vLLM source tree, without importing or installing it, and updates the lock file."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_async_spec.vllm_plugin.ledger.entries import PatchError, PatchSpec, missing, release_order
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints, module_file


class Match(str, enum.Enum):
    """The result of comparing a patch with a vLLM source tree."""

    SAME = "same"
    """The targets match a release that the patch supports."""
    CHANGED = "changed"
    """The patch is for this release, as far as known, but the targets match no release that the patch supports."""
    NOT_NEEDED = "not needed"
    """The patch is for other releases: this release is older than the fault, or has the fix."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of one patch with a vLLM source tree."""

    patch: str
    match: Match
    fingerprints: dict[str, str]
    """Fingerprints by name, for the targets and guards that the source defines."""
    release: str | None
    """The newest release that the patch supports and that has a target with the same fingerprint."""


def source_release(source: Path) -> str | None:
    """The release of an unpacked wheel, without the local part, from its dist-info; None if it has not exactly one."""
    names = [path.name for path in source.glob("vllm*.dist-info")]
    return names[0].removesuffix(".dist-info").rpartition("-")[2].partition("+")[0] if len(names) == 1 else None


def verify(specs: Sequence[PatchSpec], source: Path) -> list[Verdict]:
    """Compare every target with the vLLM source tree in `source`, which contains `vllm/`.

    Raises:
        PatchError: there is no vLLM in `source`.
    """
    _check(source)
    release = source_release(source)
    return [compare(spec, source, release) for spec in specs]


def compare(spec: PatchSpec, source: Path, release: str | None) -> Verdict:
    """Compare the targets of one patch with the source of `release`; None if it is unknown."""
    found = _fingerprints(spec, source)
    if spec.is_for_others(release):
        return Verdict(spec.name, Match.NOT_NEEDED, found, None)
    there = [target for target in spec.targets if str(target) in found]
    if not there:
        return Verdict(spec.name, Match.CHANGED, {}, None)
    as_in = [target.release_with(found[str(target)]) for target in there]
    guarded = all(guard.release_with(found.get(str(guard))) for guard in spec.guards)
    same = None not in as_in and not missing(spec.targets, found) and guarded
    newest = max(filter(None, as_in), key=release_order, default=None)
    return Verdict(spec.name, Match.SAME if same else Match.CHANGED, found, newest)


def updated_lock(
    specs: Sequence[PatchSpec], lock: Mapping[str, Mapping[str, str]], source: Path
) -> dict[str, dict[str, str]]:
    """The lock's new content: adds the fingerprints of the release in `source`, and drops those that no entry needs.

    Raises:
        PatchError: `source` has no vLLM or names no release, or a patch for that release finds no target.
    """
    _check(source)
    release = source_release(source)
    if release is None:
        raise PatchError(f"{source} has no vllm-*.dist-info that names the release; unpack a whole wheel there")
    found: dict[str, dict[str, str]] = {str(name): {} for spec in specs for name in (*spec.targets, *spec.guards)}
    for spec in specs:
        here = _fingerprints(spec, source) if spec.covers(release) else {}
        if spec.covers(release) and not here:
            raise PatchError(f"vLLM {release} has no target of {spec.name}; change its releases or its targets")
        for target in map(str, (*spec.targets, *spec.guards)):
            kept = {each: code for each, code in lock.get(target, {}).items() if each != release and spec.covers(each)}
            found[target] |= kept | ({release: here[target]} if target in here else {})
    return {
        target: {each: known[each] for each in sorted(known, key=release_order)}
        for target, known in sorted(found.items())
    }


def _check(source: Path) -> None:
    if module_file(source, "vllm") is None:
        raise PatchError(f"{source} contains no vllm/; name the directory that a vLLM wheel was unpacked into")


def _fingerprints(spec: PatchSpec, source: Path) -> dict[str, str]:
    """Fingerprints of the patch's targets and guards that the source defines, by name."""
    found: dict[str, str] = {}
    read = (*spec.targets, *spec.guards)
    for module in dict.fromkeys(target.module for target in read):
        path = module_file(source, module)
        if path is not None:
            names = [target.qualname for target in read if target.module == module]
            codes = fingerprints(path.read_text(encoding="utf-8"), names)
            found |= {f"{module}:{name}": code for name, code in codes.items()}
    return found
