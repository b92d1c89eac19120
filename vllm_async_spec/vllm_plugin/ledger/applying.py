"""What becomes of the patches in this process.

A patch is settled once for each module that it targets, when that module exists: *applied*, *not needed* (upstream has
it) or *refused* (why). Until then it is *waiting*. A patch whose need is refused is refused too, also after it was
applied. Nothing that upstream does can make an import fail here: it makes a refusal, with its reason.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger.entries import PatchError, PatchSpec, Target, missing
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints
from vllm_async_spec.vllm_plugin.ledger.import_hook import is_initialising, when_imported
from vllm_async_spec.vllm_plugin.ledger.targets import (
    defines,
    package_root,
    refuse_third_party,
    resolve,
    source_file,
)
from vllm_async_spec.vllm_plugin.ledger.verify import Match, compare


class State(str, enum.Enum):
    """What became of a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"
    WAITING = "waiting"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a patch is done; the ledger entry of the same name says why."""

    unneeded: Callable[[Any], str | None]
    """Given the object named by the first target: why this vLLM does not need the patch, or None if it does."""
    apply: Callable[[Transaction, ModuleType], None]
    """Changes attributes through the transaction, given the module of the first target that exists."""
    unneeded_here: Callable[[], str | None] = lambda: None
    """Why no process of this machine needs the patch, or None; asked first, before any module of vLLM's exists."""


@dataclass(slots=True)
class Outcome:
    """What became of one patch, and why."""

    spec: PatchSpec
    state: State = State.WAITING
    detail: str = "its module has not been imported"
    release: str | None = None
    """The release that has the target as this vLLM has it."""
    without: set[str] = field(default_factory=set)
    """Target modules that exist but do not define the target."""
    changes: Transaction | None = None
    """What was changed, to be put back."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may define the target, in one release or another."""
        return self.spec.modules


class Ledger:
    """The patches of this process.

    Args:
        implementations: by patch name.
        specs: the ledger entries.
        on_settled: called with each outcome that is no longer waiting, as it happens.
        unreadable: why the entries that can't be read can't, by patch. A patch without an entry is refused.
        release: of the vLLM at hand, as the ledger writes it; None if nothing tells it.
    """

    def __init__(
        self,
        implementations: Mapping[str, Implementation],
        specs: Iterable[PatchSpec],
        on_settled: Callable[[Outcome], None] = lambda outcome: None,
        *,
        unreadable: Mapping[str, str] | None = None,
        release: str | None = None,
    ) -> None:
        self._implementations = implementations
        self._on_settled = on_settled
        self._release = release
        self._settling: set[str] = set()
        entries = {spec.name: spec for spec in specs}
        self.outcomes = {name: Outcome(entries.get(name) or _nothing(name)) for name in sorted(implementations)}
        self._orphans = {
            name: (unreadable or {}).get(name, "it has no entry in the ledger")
            for name in implementations
            if name not in entries
        }

    def install(self) -> None:
        """Settle every patch as soon as its module exists; one that is settled stays so."""
        for name, why in self._orphans.items():
            if self.outcomes[name].state is State.WAITING:
                self._refuse(self.outcomes[name], why)
        for outcome in self.outcomes.values():
            if outcome.state is not State.WAITING:
                continue
            try:
                reason = self._implementations[outcome.spec.name].unneeded_here()
            except Exception as error:
                self._refuse(outcome, f"asking whether it is needed failed: {_told(error)}")
                continue
            if reason is not None:
                self._conclude(outcome, State.NOT_NEEDED, reason)
                continue
            if not any(map(_exists, outcome.modules)):
                self._refuse(outcome, _absent(outcome.spec.targets))
                continue
            for module in outcome.modules:
                when_imported(module, functools.partial(self.settle, outcome))

    def settle(self, outcome: Outcome, module: ModuleType) -> None:
        """Decide about one patch, now that `module` exists."""
        name = outcome.spec.name
        if outcome.state is not State.WAITING or name in self._settling:
            return
        self._settling.add(name)
        try:
            self._decide(outcome, module)
        except PatchError as error:
            self._refuse(outcome, str(error))
        except Exception as error:  # whatever upstream does to us, the original stays and the reason is shown
            self._refuse(outcome, f"applying it failed and was undone: {_told(error)}")
        finally:
            self._settling.discard(name)

    def refuse_all(self, why: str) -> None:
        """Put back everything that was changed."""
        for outcome in self.outcomes.values():
            if outcome.state in (State.APPLIED, State.WAITING):
                self._refuse(outcome, why)

    def _decide(self, outcome: Outcome, module: ModuleType) -> None:
        """Settle it, unless a module yet to come may have what this one has not."""
        spec, implementation = outcome.spec, self._implementations[outcome.spec.name]
        targets = [target for target in spec.targets if target.module == module.__name__]
        # A class that is only imported into this module is the business of the module that defines it.
        present = [target for target in targets if defines(module, target.qualname)]
        if not present:
            outcome.without.add(module.__name__)
            if all(name in outcome.without or not _exists(name) for name in outcome.modules):
                raise PatchError(_absent(spec.targets))
            return
        reason = _reason(implementation, module, present[0])
        if reason is not None:
            self._conclude(outcome, State.NOT_NEEDED, reason)
            return
        for target in present:
            refuse_third_party(module, target)
        found = fingerprints(inspect.getsource(module), [target.qualname for target in present])
        releases = [target.release_of(found.get(target.qualname)) for target in present]
        if gone := missing(targets, {str(target): found[target.qualname] for target in present}):
            raise PatchError(_absent(gone))
        self._check_needs(spec, module)
        with Transaction() as transaction:
            implementation.apply(transaction, module)
        outcome.changes, outcome.release = transaction, releases[0]
        self._conclude(outcome, State.APPLIED, f"{present[0]} is as in vLLM {releases[0]}")

    def _check_needs(self, spec: PatchSpec, module: ModuleType) -> None:
        """Refuse a patch whose need is refused, or is going to be as far as source tells.

        Raises:
            PatchError: which need, and why.
        """
        for name in spec.needs:
            if name not in self.outcomes:
                raise PatchError(f"it needs {name}, which is not in the ledger")
            need = self.outcomes[name]
            if need.state is State.WAITING and module.__name__ in need.modules:
                self.settle(need, module)
            why = need.detail if need.state is State.REFUSED else None
            if need.state is State.WAITING:
                why = self._foreseen(need, frozenset({spec.name}))
            if why is not None:
                raise PatchError(f"it needs {name}, which is refused: {why}")

    def _foreseen(self, outcome: Outcome, asking: frozenset[str]) -> str | None:
        """Why a patch is going to be refused when its module is imported, as far as its source tells; else None.

        The module may be one that only another process imports. Importing it here would be too early, so its file is
        read. A release that the ledger has the patch not for needs no look.

        Args:
            outcome: of the patch.
            asking: patches that need it, directly or not, which are not asked again.
        """
        spec = outcome.spec
        for module in map(sys.modules.get, spec.modules):
            if module is not None and not is_initialising(module):
                self.settle(outcome, module)
        if outcome.state is not State.WAITING:
            return outcome.detail if outcome.state is State.REFUSED else None
        if self._implementations[spec.name].unneeded_here() is not None:
            return None
        if self._release is not None and not spec.covers(self._release):
            return None
        root = package_root(spec.targets[0].module)
        verdict = None if root is None else compare(spec, root, self._release)
        if verdict is None or not verdict.fingerprints:
            return _absent(spec.targets)
        if verdict.match is Match.CHANGED:
            return f"{next(iter(verdict.fingerprints))} matches no release that this patch supports"
        asking |= {spec.name}
        needs = [self.outcomes[name] for name in spec.needs if name not in asking]
        return next((why for need in needs if (why := self._foreseen(need, asking)) is not None), None)

    def _refuse(self, outcome: Outcome, why: str) -> None:
        """Refuse a patch, and all that need it."""
        if outcome.changes is not None:
            outcome.changes.roll_back()
            outcome.changes = None
        self._conclude(outcome, State.REFUSED, why)
        for other in self.outcomes.values():
            if outcome.spec.name in other.spec.needs and other.state is State.APPLIED:
                self._refuse(other, f"it needs {outcome.spec.name}, which is refused: {why}")

    def _conclude(self, outcome: Outcome, state: State, detail: str) -> None:
        outcome.state, outcome.detail = state, detail
        self._on_settled(outcome)


def _nothing(name: str) -> PatchSpec:
    return PatchSpec(name, "its ledger entry can't be read", "", "", "", ())


def _absent(targets: Iterable[Target]) -> str:
    return f"this vLLM has no {' and no '.join(map(str, targets))}"


def _exists(module: str) -> bool:
    return module in sys.modules or source_file(module) is not None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _reason(implementation: Implementation, module: ModuleType, target: Target) -> str | None:
    """Why the patch is not needed, or None. What another plugin put there can't be asked."""
    try:
        return implementation.unneeded(resolve(module, target.qualname))
    except Exception:
        refuse_third_party(module, target)
        raise
