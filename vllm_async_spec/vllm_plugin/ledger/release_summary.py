"""Says in about ten lines what a release of vLLM means for the ledger: what a maintainer reads on its first day."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm_async_spec.vllm_plugin.ledger.entries import PatchSpec, known_releases, release_order
from vllm_async_spec.vllm_plugin.ledger.verify import Match, Verdict

_GUIDE = "CONTRIBUTING.md, 'Adding a release of vLLM to the ledger'"


def release_summary(specs: Sequence[PatchSpec], verdicts: Sequence[Verdict], release: str | None) -> list[str]:
    """The lines about the verdicts of `verify` on a release; None if the source does not name it."""
    by_match = {match: [each for each in verdicts if each.match is match] for match in Match}
    applying, changed = by_match[Match.SAME], by_match[Match.CHANGED]
    known = known_releases(specs)
    before = [each for each in known if release is not None and release_order(each) < release_order(release)]
    needed_before = {spec.name for spec in specs if before and before[-1] in spec.releases}
    dropped = [each.patch for each in by_match[Match.NOT_NEEDED] if each.patch in needed_before]
    others = len(by_match[Match.NOT_NEEDED]) - len(dropped)
    state = "has it" if release in known else f"ends with {known[-1]}" if known else "has no release"
    return [
        f"vLLM {release or 'of an unknown release'}; the ledger {state}.",
        _named("Still apply", (each.patch for each in applying)),
        _named(f"No longer needed, unlike in {before[-1]}" if before else "No longer needed", dropped),
        f"For other releases only: {others}",
        _named("Changed, so refused", (each.patch for each in changed)),
        *_changes(specs, changed),
        *_dependants([spec for spec, each in zip(specs, verdicts, strict=True) if each in applying], changed),
        f"Next: {_GUIDE}." if changed or release not in known else "Every patch for this release finds its target.",
    ]


def _named(what: str, names: Iterable[str]) -> str:
    listed = list(names)
    return f"{what}: {len(listed)}" + (f" ({', '.join(listed)})" if listed else "")


def _changes(specs: Sequence[PatchSpec], changed: Sequence[Verdict]) -> Iterator[str]:
    """A line for each changed patch: which of its targets and guards differ from all known releases, or are gone."""
    by_name = {spec.name: spec for spec in specs}
    for verdict in changed:
        spec = by_name[verdict.patch]
        newest = spec.releases[-1] if spec.releases else None
        found = []
        for target in (*spec.targets, *spec.guards):
            code = verdict.fingerprints.get(str(target))
            if code is not None and target.release_with(code) is None:
                found.append(f"{target} differs")
            elif code is None and newest in target.fingerprints:
                found.append(f"{target} is gone")
        yield f"  {spec.name}: {', '.join(found) or 'its targets fit together in no known release'}"


def _dependants(specs: Sequence[PatchSpec], changed: Sequence[Verdict]) -> Iterator[str]:
    """A line with those of `specs` that need a changed patch, directly or not, and so are refused too."""
    refused = {verdict.patch for verdict in changed}
    more: set[str] = set()
    while new := {spec.name for spec in specs if (refused | more).intersection(spec.needs)} - refused - more:
        more |= new
    if more:
        yield _named("Refused with them", sorted(more))
