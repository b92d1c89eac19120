"""The ledger's entries: one TOML file per patch in patches/, and a lock file of fingerprints."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LOCK = "fingerprints.lock"
"""The file in patches/ that `vllm-async-spec patches verify --update` writes.

JSON: `releases` lists all that any target has, oldest first. `targets` is {target: {release: fingerprint}}, with the
releases that changed the target: to a fingerprint, or to null if they lack it.
"""
_OLDEST = Version("0.12")
"""The oldest release that any patch is for."""


class PatchError(Exception):
    """A patch can't be applied; the message is the reason that status shows."""


@dataclass(frozen=True, slots=True)
class Target:
    """One class or function that a patch changes, and its fingerprints."""

    module: str
    qualname: str
    fingerprints: Mapping[str, str]
    """Fingerprint of the target's source, by vLLM release."""

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def release_with(self, found: str | None) -> str | None:
        """The newest release whose target has the fingerprint `found`; None if none has."""
        same = [release for release, known in self.fingerprints.items() if known == found]
        return same[-1] if same else None

    def release_of(self, found: str | None) -> str:
        """The release from `release_with`.

        Raises:
            PatchError: the target has this fingerprint in no release that the patch supports.
        """
        release = self.release_with(found)
        if release is None:
            raise PatchError(f"{self} matches no release that this patch supports: its fingerprint is {found}")
        return release


def missing(targets: Sequence[Target], found: Mapping[str, str]) -> list[Target]:
    """The targets of a patch that this vLLM lacks, by the fingerprints found.

    Not every release has all targets: the closest release counts that has some target as it is here.
    """
    alike = {
        release
        for target in targets
        for release, known in target.fingerprints.items()
        if found.get(str(target)) == known
    }
    gone = [[t for t in targets if release in t.fingerprints and str(t) not in found] for release in sorted(alike)]
    return min(gone, key=len, default=[])


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """The content of one TOML in patches/, with the fingerprints of its targets."""

    name: str
    summary: str
    why: str
    upstream: str
    remove_when: str
    targets: tuple[Target, ...]
    guards: tuple[Target, ...] = ()
    """What the patch relies on and leaves as it is, in other modules. Checked like targets, once a target exists."""
    needs: tuple[str, ...] = ()
    """Patches without which this one would do harm. If one of them is refused, this one is too."""
    ranges: tuple[SpecifierSet, ...] = ()
    """The releases that need the patch, as far as known. A later release may end an open range."""

    @classmethod
    def load(cls, path: Path, lock: Mapping[str, Mapping[str, str]]) -> PatchSpec:
        """Read a ledger entry, with its fingerprints from the lock, by target and release.

        Raises:
            PatchError: the file is not a ledger entry; the message says what is wrong.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            prose = {name: _text(data, name) for name in ("summary", "why", "upstream", "remove_when")}
            ranges = tuple(map(SpecifierSet, _texts(data["releases"])))
            targets = tuple(_target(name, ranges, lock) for name in _texts(data["targets"]))
            guards = tuple(_target(name, ranges, lock) for name in _texts(data.get("guards", [])))
            needs = tuple(_texts(data.get("needs", [])))
            if not targets:
                raise ValueError("it has no targets")
            return cls(path.stem, **prose, targets=targets, guards=guards, needs=needs, ranges=ranges)
        except KeyError as error:
            raise PatchError(f"{path} is not a ledger entry: {error.args[0]} is missing") from error
        except (OSError, TypeError, ValueError) as error:  # the errors of TOML, Unicode and specifiers are ValueErrors
            raise PatchError(f"{path} is not a ledger entry: {error}") from error

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that the patch is for and whose fingerprints are known, oldest first."""
        named = {release for target in self.targets for release in target.fingerprints}
        return tuple(sorted(named, key=release_order))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may define a target, in one release or another."""
        return tuple(dict.fromkeys(target.module for target in self.targets))

    def covers(self, release: str) -> bool:
        """Whether the patch is for `release`, which may be newer than all releases in the lock file."""
        return release in self.releases or _within(self.ranges, release)

    def is_for_others(self, release: str | None) -> bool:
        """Whether the patch is only for releases other than `release`.

        A build of untagged source has no version, or a low one such as 0.1.dev1. It may contain any source, so only
        fingerprints tell whether the patch is for it.
        """
        return release is not None and release_order(release) >= _OLDEST and not self.covers(release)


def _target(name: str, ranges: tuple[SpecifierSet, ...], lock: Mapping[str, Mapping[str, str]]) -> Target:
    module, colon, qualname = name.partition(":")
    if not (module and colon and qualname):
        raise ValueError(f"the target {name!r} is not of the form module:qualname")
    known = lock.get(name, {})
    return Target(module, qualname, {release: known[release] for release in known if _within(ranges, release)})


@functools.cache  # a process asks for the same releases and ranges many times
def _within(ranges: tuple[SpecifierSet, ...], release: str) -> bool:
    try:
        # Without the suffix, because 0.19.0rc1 has the source of 0.19 and not that of 0.18.
        version = Version(release).base_version
        return any(each.contains(version) for each in ranges)
    except InvalidVersion:
        return False


def _text(data: Mapping[str, object], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string")
    return value


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{value!r} must be a list of strings")
    return value


def ledger_directory() -> Path:
    """Where the TOMLs are: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed, checkout = package / "patches", package.parent / "patches"
    return installed if installed.is_dir() else checkout


def read_lock(directory: Path) -> dict[str, dict[str, str]]:
    """The fingerprints, by target and release.

    Raises:
        PatchError: the lock file can't be read; the message says why.
    """
    path = directory / LOCK
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        releases = written["releases"].split()
        return {target: _in_each(changes, releases) for target, changes in written["targets"].items()}
    except KeyError as error:
        raise PatchError(f"{path} is not a lock file of fingerprints: {error} is missing") from error
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise PatchError(f"{path} is not a lock file of fingerprints: {error}") from error


def _in_each(changes: Mapping[str, str | None], releases: Sequence[str]) -> dict[str, str]:
    """A target's fingerprint in each release that has it."""
    if wrong := changes.keys() - set(releases):
        raise ValueError(f"{min(wrong)!r} is none of its releases")
    known, code = dict[str, str](), None
    for release in releases:
        code = changes.get(release, code)
        if code is not None:
            known[release] = code
    return known


def lock_text(lock: Mapping[str, Mapping[str, str]]) -> str:
    """The lock file's text, in which a release that changes nothing is one word."""
    releases = sorted({release for known in lock.values() for release in known}, key=release_order)
    targets: dict[str, dict[str, str | None]] = {}
    for target, known in lock.items():
        codes = [None, *map(known.get, releases)]
        targets[target] = {
            release: code for release, before, code in zip(releases, codes, codes[1:], strict=False) if code != before
        }
    return json.dumps({"releases": " ".join(releases), "targets": targets}, indent=1) + "\n"


def read_ledger(directory: Path | None = None) -> tuple[tuple[PatchSpec, ...], dict[str, str]]:
    """The readable entries of the installed or another ledger, sorted by name, and why each other entry can't be read.

    Raises:
        PatchError: there is no ledger, or the lock file can't be read.
    """
    directory = directory or ledger_directory()
    paths = sorted(directory.glob("*.toml"))
    if not paths:
        raise PatchError(f"there is no patch ledger in {directory}; reinstall vllm-async-spec")
    lock = read_lock(directory)
    specs: list[PatchSpec] = []
    unreadable: dict[str, str] = {}
    for path in paths:
        try:
            specs.append(PatchSpec.load(path, lock))
        except PatchError as error:
            unreadable[path.stem] = str(error)
    return tuple(specs), unreadable


def load_ledger(directory: Path | None = None) -> tuple[PatchSpec, ...]:
    """All ledger entries, sorted by name.

    Raises:
        PatchError: an entry or the lock file can't be read, or there is no ledger.
    """
    specs, unreadable = read_ledger(directory)
    if unreadable:
        raise PatchError(next(iter(unreadable.values())))
    return specs


def find_patch(name: str) -> PatchSpec:
    """The ledger entry of this name.

    Raises:
        PatchError: there is none, or the ledger can't be read.
    """
    for spec in load_ledger():
        if spec.name == name:
            return spec
    raise PatchError(f"the ledger has no patch {name}")


def release_order(release: str) -> Version:
    """The key that sorts releases by age. A string that is no version sorts first."""
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0.dev0")


def known_releases(specs: Sequence[PatchSpec]) -> tuple[str, ...]:
    """Every release for which some entry has fingerprints, oldest first."""
    return tuple(sorted({release for spec in specs for release in spec.releases}, key=release_order))


def release_runs(specs: Sequence[PatchSpec], spec: PatchSpec) -> list[str]:
    """The releases that `spec` is for, as ranges of consecutive releases that the ledger knows."""
    runs: list[list[str]] = [[]]
    for release in known_releases(specs):
        if release in spec.releases:
            runs[-1].append(release)
        elif runs[-1]:
            runs.append([])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs if run]
