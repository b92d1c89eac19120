"""The entries of the ledger: the TOML files in patches/."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class PatchError(Exception):
    """A patch can't be applied; the message is the reason that status shows."""


@dataclass(frozen=True, slots=True)
class Target:
    """One class or function that a patch changes, as one or more releases have it."""

    module: str
    qualname: str
    fingerprints: Mapping[str, str]
    """vLLM release to fingerprint of the target's source in it."""

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def release_with(self, found: str | None) -> str | None:
        """The newest release whose target has the fingerprint `found`; None if none has."""
        same = [release for release, known in self.fingerprints.items() if known == found]
        return same[-1] if same else None

    def release_of(self, source: str) -> str:
        """The newest release that has this target as `source` has it.

        Raises:
            PatchError: no release that the patch is for has it so.
        """
        found = fingerprint(source, self.qualname)
        release = self.release_with(found)
        if release is None:
            raise PatchError(f"{self} matches no release that this patch supports: its fingerprint is {found}")
        return release


def missing(targets: Sequence[Target], found: Mapping[str, str]) -> list[Target]:
    """The targets that are gone: each release that has the others as they are has these too.

    Args:
        targets: of one patch. Not every release has all of them.
        found: the fingerprints of those that are there, by the target's name.
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
    """What a TOML in patches/ says."""

    name: str
    summary: str
    why: str
    upstream: str
    remove_when: str
    targets: tuple[Target, ...]
    needs: tuple[str, ...] = ()
    """Patches without which this one would do harm: where one of them is refused, this one is too."""

    @classmethod
    def load(cls, path: Path) -> PatchSpec:
        """Read a ledger entry.

        Raises:
            PatchError: the file is not a ledger entry; the message says what is wrong.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            prose = {name: _text(data, name) for name in ("summary", "why", "upstream", "remove_when")}
            targets = tuple(
                Target(_text(each, "module"), _text(each, "qualname"), _texts(each["fingerprints"]))
                for each in data["targets"]
            )
            needs = tuple(_texts(dict.fromkeys(data.get("needs", ()), "")))
            if not targets:
                raise ValueError("it has no targets")
            return cls(path.stem, **prose, targets=targets, needs=needs)
        except KeyError as error:
            raise PatchError(f"{path} is not a ledger entry: {error.args[0]} is missing") from error
        except (OSError, TypeError, ValueError, AttributeError) as error:  # of which TOML's and Unicode's are
            raise PatchError(f"{path} is not a ledger entry: {error}") from error

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that the patch is for, oldest first."""
        return tuple(dict.fromkeys(release for target in self.targets for release in target.fingerprints))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may define a target, in one release or another."""
        return tuple(dict.fromkeys(target.module for target in self.targets))


def _text(data: Mapping[str, object], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string")
    return value


def _texts(data: Mapping[str, object]) -> dict[str, str]:
    if wrong := [name for name in data if not isinstance(data[name], str) or not isinstance(name, str)]:
        raise TypeError(f"{wrong[0]!r} is {data[wrong[0]]!r}; both must be strings")
    return dict(data)  # type: ignore[arg-type]


def ledger_directory() -> Path:
    """Where the TOMLs are: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed, checkout = package / "patches", package.parent / "patches"
    return installed if installed.is_dir() else checkout


def read_ledger(directory: Path | None = None) -> tuple[tuple[PatchSpec, ...], dict[str, str]]:
    """Every ledger entry that can be read, by name, and why the others can't, by patch.

    Raises:
        PatchError: there is no ledger.
    """
    directory = directory or ledger_directory()
    specs: list[PatchSpec] = []
    unreadable: dict[str, str] = {}
    for path in sorted(directory.glob("*.toml")):
        try:
            specs.append(PatchSpec.load(path))
        except PatchError as error:
            unreadable[path.stem] = str(error)
    if not specs and not unreadable:
        raise PatchError(f"there is no patch ledger in {directory}; reinstall vllm-async-spec")
    return tuple(specs), unreadable


def load_ledger(directory: Path | None = None) -> tuple[PatchSpec, ...]:
    """All ledger entries, by name.

    Raises:
        PatchError: an entry can't be read, or there is none.
    """
    specs, unreadable = read_ledger(directory)
    if unreadable:
        raise PatchError(next(iter(unreadable.values())))
    return specs


def release_order(release: str) -> Version:
    """The key that sorts releases by age; what is no version is older than any."""
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0.dev0")


def known_releases(specs: Sequence[PatchSpec]) -> tuple[str, ...]:
    """Every release that some ledger entry names, oldest first."""
    return tuple(sorted({release for spec in specs for release in spec.releases}, key=release_order))


def release_runs(specs: Sequence[PatchSpec], spec: PatchSpec) -> list[str]:
    """The releases that `spec` is for, as runs without a gap among those that the ledger knows."""
    runs: list[list[str]] = [[]]
    for release in known_releases(specs):
        if release in spec.releases:
            runs[-1].append(release)
        elif runs[-1]:
            runs.append([])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs if run]
