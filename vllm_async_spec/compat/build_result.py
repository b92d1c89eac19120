"""One build of one batch: what was found, and the same as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.audit.remedies import remedy
from vllm_async_spec.compat.cases import Host
from vllm_async_spec.compat.compare import Difference, Judgement
from vllm_async_spec.compat.device import Wait


@dataclass(frozen=True, slots=True)
class Build:
    """One build of one batch.

    Attributes:
        host: What the host was told.
        failure: The exception and where it was raised; None if the build finished.
        waits: Where the host would wait, in the order of time.
        changed: Fields of the common metadata that the builder changed in place.
        differences: Fields that differ from the build with exact host lengths.
        not_validated: Fields that depend on kernels that did not run; they have not been judged.
        skipped: Fields that can't be compared, such as functions.
        updated: Whether it was built for the draft step before, and updated.
    """

    host: Host
    failure: str | None = None
    waits: tuple[Wait, ...] = ()
    changed: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    not_validated: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    updated: bool = False

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """Differences judged wrong."""
        return tuple(each for each in self.differences if each.judgement is Judgement.WRONG)

    @property
    def serves(self) -> bool:
        """Whether it finished without a wait, and nothing in the result is wrong."""
        return self.failure is None and not self.waits and not self.wrong

    @property
    def equal(self) -> bool:
        """Whether it finished, and the result equals the exact one in all fields compared."""
        return self.failure is None and not self.differences

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything wrong with the build, in a sentence each."""
        told = f"{'after its update, ' if self.updated else ''}told {self.host.value}"
        found = [f"{told}, it waits: {wait}" for wait in dict.fromkeys(map(str, self.waits))]
        if self.failure is not None:
            found.append(f"{told}, it fails: {self.failure}")
        found += [f"{told}, {difference}" for difference in self.wrong]
        found += [f"{told}, it changes {name} of the common metadata in place" for name in self.changed]
        return tuple(found)

    def to_dict(self, realistic: bool) -> dict[str, Any]:
        """As plain data, for JSON; `realistic` says whether the host of an asynchronous engine knows as much."""
        return {
            "host": self.host.value,
            "realistic": realistic,
            "failure": self.failure,
            "waits": waits_data(self.waits),
            "changed": list(self.changed),
            "differences": differences_data(self.differences),
            "equal": self.equal,
            "not_validated": list(self.not_validated),
            "skipped": list(self.skipped),
            "updated": self.updated,
        }


def differences_data(differences: Sequence[Difference]) -> list[dict[str, str]]:
    """Differences as plain data."""
    return [{"field": d.field, "judgement": d.judgement.value, "exact": d.exact, "found": d.found} for d in differences]


def waits_data(waits: Sequence[Wait]) -> list[dict[str, Any]]:
    """Waits as plain data, each with its stack."""
    return [
        {
            "kind": wait.kind.value,
            "what": wait.what,
            "instead": remedy(wait.kind, wait.what),
            "stack": [f"{f.file}:{f.line} in {f.function}: {f.source}" for f in wait.stack],
        }
        for wait in waits
    ]
