"""The ledger knows each release of vLLM that pip finds, or a line here says why not."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping

import pytest
from ledger_source import spec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_async_spec.compat.fetch import FetchError, releases_of_pip
from vllm_async_spec.vllm_plugin.ledger import PatchSpec, known_releases, load_ledger

OLDEST = "0.12.0"

LEFT_OUT: Mapping[str, str] = {}
"""Release to the reason why the ledger does not know it, though it knows newer ones."""


def unknown_releases(
    found: Iterable[str], known: Iterable[str], left_out: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Final releases from `OLDEST` on that are neither known nor left out: those below the newest known, and newer."""
    known = set(known)
    newest = max(map(Version, known))
    versions = [Version(release) for release in found]
    unknown = sorted(
        version
        for version in versions
        if version >= Version(OLDEST) and not version.is_prerelease and not version.is_devrelease
        if version.public not in known | set(left_out)
    )
    return [str(each) for each in unknown if each < newest], [str(each) for each in unknown if each > newest]


def test_the_ledger_knows_each_release_that_pip_finds():
    known = known_releases(load_ledger())
    try:
        found = releases_of_pip()
    except FetchError as error:
        pytest.skip(str(error))
    gaps, newer = unknown_releases(found, known, LEFT_OUT)
    remedy = "do what CONTRIBUTING.md says under 'Adding a release of vLLM to the ledger'"
    if newer:
        # Work to do, and no reason to fail.
        warnings.warn(
            f"vLLM {', '.join(newer)} came after {known[-1]}, the newest in the ledger; {remedy}", stacklevel=1
        )
    assert not gaps, f"the ledger in patches/ lacks vLLM {', '.join(gaps)}; {remedy}, or give a reason in LEFT_OUT"


def without_fingerprints(specs: Iterable[PatchSpec]) -> dict[str, list[str]]:
    specs = tuple(specs)
    found = {
        spec.name: [
            release
            for release in known_releases(specs)
            if spec.covers(release)
            and (release not in spec.releases or any(release not in guard.fingerprints for guard in spec.guards))
        ]
        for spec in specs
    }
    return {name: releases for name, releases in found.items() if releases}


def test_each_entry_has_fingerprints_of_each_known_release_in_its_ranges():
    assert without_fingerprints(load_ledger()) == {}


def test_an_entry_without_the_fingerprints_of_a_release_is_listed():
    full, ranges = spec("vllm.a"), (SpecifierSet(">=1.0"),)
    (target,) = full.targets
    newer = dataclasses.replace(target, fingerprints={"1.0": "00", "2.0": "00"})
    specs = (
        dataclasses.replace(full, name="full", targets=(newer,), ranges=ranges),
        dataclasses.replace(full, name="lacking", ranges=ranges),
        dataclasses.replace(full, name="without a guard's", targets=(newer,), guards=(target,), ranges=ranges),
        dataclasses.replace(full, name="for others", ranges=(SpecifierSet("<2.0"),)),
    )
    assert without_fingerprints(specs) == {"lacking": ["2.0"], "without a guard's": ["2.0"]}


def test_what_is_left_out_has_a_reason_and_is_not_known():
    assert all(LEFT_OUT.values())
    assert not set(LEFT_OUT) & set(known_releases(load_ledger()))


def test_gaps_are_told_from_newer_releases():
    found = ["0.34.0rc1", "0.33.0", "0.32.0.post1", "0.32.0", "0.31.0", "0.30.1", "0.30.0", "0.12.0rc1", "0.11.2"]
    known = ["0.30.0", "0.32.0"]
    assert unknown_releases(found, known, []) == (["0.30.1", "0.31.0"], ["0.32.0.post1", "0.33.0"])
    assert unknown_releases(found, known, ["0.30.1", "0.31.0"]) == ([], ["0.32.0.post1", "0.33.0"])
