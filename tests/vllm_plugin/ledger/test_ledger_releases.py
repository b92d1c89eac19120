"""The ledger knows each release of vLLM that pip finds, or a line here says why not."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping

import pytest
from packaging.version import Version

from vllm_async_spec.vllm_plugin.ledger import known_releases, load_ledger

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


def releases_of_pip() -> list[str]:
    """Those that `pip index versions` lists; skips where it lists none, and says why."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("pip index versions vllm did not answer within 120 seconds")
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or listed is None:
        reason = (done.stderr.strip().splitlines() or ["it lists no versions"])[-1]
        pytest.skip(f"no package index to ask for the releases of vLLM: {reason}")
    return listed[1].split(", ")


def test_the_ledger_knows_each_release_that_pip_finds() -> None:
    known = known_releases(load_ledger())
    gaps, newer = unknown_releases(releases_of_pip(), known, LEFT_OUT)
    remedy = "do what CONTRIBUTING.md says under 'Adding a release of vLLM to the ledger'"
    if newer:
        # Work to do, and no reason to fail.
        warnings.warn(
            f"vLLM {', '.join(newer)} came after {known[-1]}, the newest in the ledger; {remedy}", stacklevel=1
        )
    assert not gaps, f"the ledger in patches/ lacks vLLM {', '.join(gaps)}; {remedy}, or give a reason in LEFT_OUT"


def test_what_is_left_out_has_a_reason_and_is_not_known() -> None:
    assert all(LEFT_OUT.values())
    assert not set(LEFT_OUT) & set(known_releases(load_ledger()))


def test_gaps_are_told_from_newer_releases() -> None:
    found = ["0.34.0rc1", "0.33.0", "0.32.0.post1", "0.32.0", "0.31.0", "0.30.1", "0.30.0", "0.12.0rc1", "0.11.2"]
    known = ["0.30.0", "0.32.0"]
    assert unknown_releases(found, known, []) == (["0.30.1", "0.31.0"], ["0.32.0.post1", "0.33.0"])
    assert unknown_releases(found, known, ["0.30.1", "0.31.0"]) == ([], ["0.32.0.post1", "0.33.0"])
