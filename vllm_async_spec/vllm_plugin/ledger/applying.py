"""Applies the patches in this process, and keeps the state of each.

A patch is *waiting* until a module that defines its target exists. Then the ledger settles it: *applied*, *not needed*
(vLLM has the change) or *refused*, with a reason. If a patch that it needs is refused, the patch is refused too, even
after it was applied. No change in vLLM makes an import fail here; it causes a refusal with a reason.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger.entries import PatchError, PatchSpec, Target, missing
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints
from vllm_async_spec.vllm_plugin.ledger.import_hook import is_initialising, when_imported
from vllm_async_spec.vllm_plugin.ledger.targets import defines, package_root, refuse_third_party, source_file
from vllm_async_spec.vllm_plugin.ledger.verify import Match, compare


class State(str, enum.Enum):
    """The state of a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"
    WAITING = "waiting"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Implementation:
    """The code of a patch. The ledger entry of the same name gives the reasons and the releases that need it."""

    apply: Callable[[Transaction, ModuleType], None]
    """Takes the module of the first target that exists, and changes attributes through the transaction."""
    unneeded: Callable[[], str | None] = lambda: None
    """Returns why this platform does not need the patch, or None. Called when a target's module exists."""
    unneeded_here: Callable[[], str | None] = lambda: None
    """Returns why no process of this machine needs the patch, or None. Called first, before vLLM's modules exist."""


@dataclass(slots=True)
class Outcome:
    """The state of one patch, and the reason."""

    spec: PatchSpec
    state: State = State.WAITING
    detail: str = "its module has not been imported"
    release: str | None = None
    """The newest known release whose target has the same fingerprint as this vLLM's."""
    without: set[str] = field(default_factory=set)
    """Target modules that exist but do not define the target."""
    changes: Transaction | None = None
    """The changes of an applied patch, for rolling back."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may define the target, in one release or another."""
        return self.spec.modules


class Ledger:
    """The patches of this process.

    Args:
        implementations: by patch name.
        specs: the ledger entries.
        on_settled: called with each outcome when its state changes.
        unreadable: reasons why entries can't be read, by patch. A patch without an entry is refused.
        release: the installed vLLM's release, as the ledger writes it; None if it is unknown.
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
        for name in entries.keys() & self.outcomes.keys():
            if entries[name].is_for_others(release):
                outcome = self.outcomes[name]
                outcome.state, outcome.detail = State.NOT_NEEDED, f"vLLM {release} is not among its releases"
        self._orphans = {
            name: (unreadable or {}).get(name, "it has no entry in the ledger")
            for name in implementations
            if name not in entries
        }

    def install(self) -> None:
        """Settle each waiting patch, now or as soon as its module is imported."""
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
        """Apply, skip or refuse one patch, now that `module` exists."""
        name = outcome.spec.name
        if outcome.state is not State.WAITING or name in self._settling:
            return
        self._settling.add(name)
        try:
            self._decide(outcome, module)
        except PatchError as error:
            self._refuse(outcome, str(error))
        except Exception as error:  # on any error vLLM's original stays, and status shows the reason
            self._refuse(outcome, f"applying it failed and was undone: {_told(error)}")
        finally:
            self._settling.discard(name)

    def foresee(self, names: Iterable[str]) -> dict[str, tuple[State, str]]:
        """What becomes of waiting patches when their modules are imported, according to vLLM's source, and why.

        Call this once the platform is known. Patches that can't be foreseen are left out.
        """
        found = {}
        for outcome in map(self.outcomes.__getitem__, names):
            implementation = self._implementations[outcome.spec.name]
            try:
                reason = implementation.unneeded_here() or implementation.unneeded()
                why = None if reason else self._foreseen(outcome, frozenset())
            except Exception:  # the patch stays waiting, and its own attempt will tell
                continue
            if outcome.state is not State.WAITING:
                continue
            if reason is not None:
                found[outcome.spec.name] = (State.NOT_NEEDED, reason)
            elif why is not None:
                found[outcome.spec.name] = (State.REFUSED, why)
            else:
                found[outcome.spec.name] = (State.APPLIED, "it is applied when vLLM imports its module")
        return found

    def refuse_all(self, why: str) -> None:
        """Undo every applied patch, and refuse every waiting one."""
        for outcome in reversed(self.outcomes.values()):  # a later patch may wrap the wrapper of an earlier one
            if outcome.state in (State.APPLIED, State.WAITING):
                self._refuse(outcome, why)

    def _decide(self, outcome: Outcome, module: ModuleType) -> None:
        """Settle a patch, unless this module lacks the targets and a later module may define them."""
        spec, implementation = outcome.spec, self._implementations[outcome.spec.name]
        targets = [target for target in spec.targets if target.module == module.__name__]
        # Skip imported classes: the ledger settles a patch in the module that defines its target.
        present = [target for target in targets if defines(module, target.qualname)]
        if not present:
            outcome.without.add(module.__name__)
            if all(name in outcome.without or not _exists(name) for name in outcome.modules):
                raise PatchError(_absent(spec.targets))
            return
        reason = implementation.unneeded()
        if reason is not None:
            self._conclude(outcome, State.NOT_NEEDED, reason)
            return
        for target in present:
            refuse_third_party(module, target)
        found = fingerprints(inspect.getsource(module), [target.qualname for target in present])
        releases = [target.release_of(found.get(target.qualname)) for target in present]
        if gone := missing(targets, {str(target): found[target.qualname] for target in present}):
            raise PatchError(_absent(gone))
        for guard in spec.guards:
            source = inspect.getsource(importlib.import_module(guard.module))
            guard.release_of(fingerprints(source, [guard.qualname]).get(guard.qualname))
        self._check_needs(spec, module)
        with Transaction() as transaction:
            implementation.apply(transaction, module)
        outcome.changes, outcome.release = transaction, releases[0]
        self._conclude(outcome, State.APPLIED, f"{present[0]} is as in vLLM {releases[0]}")

    def _check_needs(self, spec: PatchSpec, module: ModuleType) -> None:
        """Check that no patch that this one needs is refused, or will be according to vLLM's source.

        Raises:
            PatchError: a needed patch is or will be refused; the message has the reason.
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
        """The reason why a patch will be refused when its module is imported, according to vLLM's source, or None.

        Perhaps only another process imports the module. An import here would be too early, so this method reads the
        module's file. If the patch is not for this release, the file is not read. Patches in `asking` need this patch,
        directly or not, and are not checked again.
        """
        spec = outcome.spec
        for module in map(sys.modules.get, spec.modules):
            if module is not None and not is_initialising(module):
                self.settle(outcome, module)
        if outcome.state is not State.WAITING:
            return outcome.detail if outcome.state is State.REFUSED else None
        if self._implementations[spec.name].unneeded_here() is not None:
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
        """Refuse a patch and all applied patches that need it, and undo their changes."""
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
