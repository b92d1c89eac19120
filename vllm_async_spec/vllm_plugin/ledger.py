"""The patch ledger: what each TOML in patches/ says, and what became of it in this process.

A patch is settled once for each module that it targets, when that module exists: *applied*, *not needed* (upstream has
it) or *refused* (why). Until then it is *waiting*. Nothing is ever silently left out, and nothing half-applied.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_async_spec.vllm_plugin.fingerprint import fingerprint, module_file
from vllm_async_spec.vllm_plugin.import_hook import when_imported
from vllm_async_spec.vllm_plugin.transaction import Transaction

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class PatchError(Exception):
    """A patch can't be applied; the message is the reason that status shows."""


class State(str, enum.Enum):
    """What became of a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"
    WAITING = "waiting"
    OFF = "off"


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
            raise PatchError(f"{self} is as in no release that the patch is for: its fingerprint is {found}")
        return release


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """What a TOML in patches/ says."""

    name: str
    summary: str
    why: str
    upstream: str
    remove_when: str
    targets: tuple[Target, ...]

    @classmethod
    def load(cls, path: Path) -> PatchSpec:
        """Read a ledger entry.

        Raises:
            PatchError: the file is not a ledger entry; the message says what is wrong.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            targets = tuple(Target(t["module"], t["qualname"], t["fingerprints"]) for t in data["targets"])
            return cls(path.stem, data["summary"], data["why"], data["upstream"], data["remove_when"], targets)
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise PatchError(f"{path} is not a ledger entry: {error!r}") from error

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that the patch is for, oldest first."""
        return tuple(dict.fromkeys(release for target in self.targets for release in target.fingerprints))


def ledger_directory() -> Path:
    """Where the TOMLs are: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "patches", package.parent / "patches"
    return installed if installed.is_dir() else checkout


def load_ledger(directory: Path | None = None) -> tuple[PatchSpec, ...]:
    """All ledger entries, by name.

    Raises:
        PatchError: an entry can't be read, or there is none.
    """
    directory = directory or ledger_directory()
    specs = tuple(PatchSpec.load(path) for path in sorted(directory.glob("*.toml")))
    if not specs:
        raise PatchError(f"there is no patch ledger in {directory}; reinstall vllm-async-spec")
    return specs


def release_order(release: str) -> tuple[int, ...]:
    """The key that sorts releases by age."""
    return tuple(int(part) for part in release.split("."))


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

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may define the target, in one release or another."""
        return tuple(dict.fromkeys(target.module for target in self.spec.targets))

    def refuse(self, reason: str) -> None:
        """Say that it can't be applied."""
        self.state, self.detail = State.REFUSED, reason


@dataclass(slots=True)
class Ledger:
    """The patches of this process.

    Args:
        implementations: by patch name.
        specs: the ledger entries; each needs an implementation and each implementation an entry.
        on_settled: called with each outcome that is no longer waiting, as it happens.

    Raises:
        PatchError: an entry has no implementation, or an implementation no entry.
    """

    implementations: Mapping[str, Implementation]
    specs: tuple[PatchSpec, ...]
    on_settled: Callable[[Outcome], None] = lambda outcome: None
    outcomes: dict[str, Outcome] = field(init=False)

    def __post_init__(self) -> None:
        named = {spec.name for spec in self.specs}
        if odd := sorted(named ^ set(self.implementations)):
            raise PatchError(f"patches and implementations do not match: {', '.join(odd)} is only one of the two")
        self.outcomes = {spec.name: Outcome(spec) for spec in self.specs}

    def install(self) -> None:
        """Settle every patch as soon as its module exists; one that is settled stays so."""
        for outcome in self.outcomes.values():
            if outcome.state is not State.WAITING:
                continue
            reason = self.implementations[outcome.spec.name].unneeded_here()
            if reason is not None:
                outcome.state, outcome.detail = State.NOT_NEEDED, reason
                self.on_settled(outcome)
                continue
            for module in outcome.modules:
                when_imported(module, functools.partial(self.settle, outcome))

    def settle(self, outcome: Outcome, module: ModuleType) -> None:
        """Decide about one patch, now that `module` exists."""
        if outcome.state is State.WAITING and self._settles(outcome, module):
            self.on_settled(outcome)

    def _settles(self, outcome: Outcome, module: ModuleType) -> bool:
        """Decide, and return whether that could be done: a module yet to come may have what this one has not."""
        spec, implementation = outcome.spec, self.implementations[outcome.spec.name]
        targets = [target for target in spec.targets if target.module == module.__name__]
        # A class that is only imported into this module is the business of the module that defines it.
        present = [target for target in targets if _defines(module, target.qualname)]
        if not present:
            outcome.without.add(module.__name__)
            gone = all(name in outcome.without or find_spec(name) is None for name in outcome.modules)
            if gone:
                outcome.refuse(f"this vLLM has no {' and no '.join(map(str, spec.targets))}")
            return gone
        try:
            reason = _reason(implementation, module, present[0])
            if reason is not None:
                outcome.state, outcome.detail = State.NOT_NEEDED, reason
                return True
            for target in present:
                _refuse_foreign(module, target)
            source = inspect.getsource(module)
            releases = [target.release_of(source) for target in present]
            with Transaction() as transaction:
                implementation.apply(transaction, module)
        except PatchError as error:
            outcome.refuse(str(error))
        except Exception as error:  # whatever upstream does to us, the original stays and the reason is shown
            outcome.refuse(f"applying it failed and was undone: {type(error).__name__}: {error}")
        else:
            outcome.state, outcome.release = State.APPLIED, releases[0]
            outcome.detail = f"{present[0]} is as in vLLM {releases[0]}"
        return True


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
    """Compare every target with the source of some vLLM, which is neither imported nor installed.

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
    return [_verdict(spec, source, release if known else None) for spec in specs]


def _verdict(spec: PatchSpec, source: Path, release: str | None) -> Verdict:
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
    return Verdict(spec.name, Match.SAME if found and same else Match.CHANGED, found, matched)


def _reason(implementation: Implementation, module: ModuleType, target: Target) -> str | None:
    """Why the patch is not needed, or None. What another plugin put there can't be asked."""
    try:
        return implementation.unneeded(_resolve(module, target.qualname))
    except Exception:
        _refuse_foreign(module, target)
        raise


def _defines(module: ModuleType, qualname: str) -> bool:
    owner = getattr(module, qualname.partition(".")[0], None)
    if getattr(owner, "__module__", None) != module.__name__:
        return False
    try:
        _resolve(module, qualname)
    except AttributeError:
        return False
    return True


def _resolve(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def _refuse_foreign(module: ModuleType, target: Target) -> None:
    """Two plugins on one target would undo each other: the later one stands back."""
    value = _resolve(module, target.qualname)
    functions = [value] if inspect.isroutine(value) else [v for v in vars(value).values() if inspect.isroutine(v)]
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and not _is_at_home(code.co_filename, module):
            raise PatchError(
                f"{target} has been replaced by another plugin ({code.co_filename}:{code.co_firstlineno}); "
                "disable one of the two, with VLLM_PLUGINS or VLLM_ASYNC_SPEC=off"
            )


_OURS = str(Path(__file__).resolve().parents[1])
# Decorators that upstream itself puts on its functions, such as @deprecated, @contextmanager and @inference_mode.
_DECORATORS = {
    "typing_extensions.py",
    "warnings.py",
    "contextlib.py",
    "functools.py",
    "dataclasses.py",
    "reprlib.py",
    "_contextlib.py",
}


def _is_at_home(filename: str, module: ModuleType) -> bool:
    generated = filename.startswith("<")  # as a dataclass's __init__ is
    return generated or filename == module.__file__ or filename.startswith(_OURS) or Path(filename).name in _DECORATORS
